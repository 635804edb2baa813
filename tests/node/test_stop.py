"""A request to stop cuts short what may be cut short, and nothing else."""

import os
import signal

import pytest
import trio
import trio.testing

from node.stop import Stop, watch_signals


async def test_a_stop_ends_interruptible_blocks_now_and_later_and_nothing_else() -> None:
    stop = Stop()
    ended: list[str] = []

    async def interruptible() -> None:
        with stop.interruptible():
            await trio.sleep_forever()
        ended.append("interruptible")

    async def necessary() -> None:
        await trio.testing.wait_all_tasks_blocked()
        stop.request()
        await trio.sleep(0)
        ended.append("necessary")

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(interruptible)
            nursery.start_soon(interruptible)
            nursery.start_soon(necessary)
        assert sorted(ended) == ["interruptible", "interruptible", "necessary"]
        with stop.interruptible():
            await trio.sleep_forever()


async def test_a_block_that_ends_before_a_stop_is_not_touched_by_it() -> None:
    stop = Stop()
    with stop.interruptible():
        await trio.sleep(0)
    stop.request()
    await trio.sleep(0)
    assert stop.requested


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_asks_for_a_stop_and_a_second_one_ends_the_node(number: signal.Signals) -> None:
    stop = Stop()
    with pytest.RaisesGroup(KeyboardInterrupt), trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signals, stop, lambda level, text: None)
            with stop.interruptible():
                os.kill(os.getpid(), number)
                await trio.sleep_forever()
            assert stop.requested
            os.kill(os.getpid(), signal.SIGTERM)
            await trio.sleep_forever()
