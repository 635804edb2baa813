"""`swarmnode testnet`, from what was typed to the exit status."""

import json
import random
import sys
from dataclasses import asdict

import trio

from node.testnet.fleet import Fleet, Member, how
from node.testnet.plan import Wishes, make_plans
from node.testnet.table import outcome, table
from node.testnet.view import open_view
from node.text import printable

_TAIL = 25
"""Lines shown of the log of a node that failed."""


def run_testnet(wishes: Wishes, kill_every: float | None, plain: bool, as_json: bool) -> int:
    """Run a testnet in the foreground and print what came out. Returns the exit status: 1 if a node failed.

    Raises PlanError, ConfigError or DataDirError before anything is started, OSError if a node cannot be.
    """
    plans = make_plans(wishes)
    with open_view(plain, str(wishes.path), wishes.rounds) as view:
        resumed = sum(plan.resumes for plan in plans)
        going_on = f"{resumed} of them go on where they were" if resumed else "all new"
        view.say("info", f"{len(plans)} nodes in {wishes.path}, {going_on}; a folder and a log each")
        fleet = Fleet(plans, view.say, kill_every, random.Random(wishes.seed))
        trio.run(fleet.run, lambda: view.look(fleet.members))
    outcomes = [outcome(member) for member in fleet.members]
    if as_json:
        print(json.dumps([asdict(each) for each in outcomes], indent=2))
    else:
        print("\n".join(table(outcomes)))
    failed = [member for member in fleet.members if member.status != 0]
    for member in failed:
        _tell_failure(member)
    return 1 if failed else 0


def _tell_failure(member: Member) -> None:
    member.log.read()
    ended = how(member.status) if member.status is not None else "not started"
    print(f"\n{member.plan.name} failed ({ended}); the end of {member.plan.log}:", file=sys.stderr)
    for line in list(member.log.last)[-_TAIL:]:
        print(f"  {printable(line)}", file=sys.stderr)
