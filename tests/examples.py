"""How many examples property tests look at: few in the suite, as many as `TEST_EXAMPLES` says in a long run.

Those of the suite are the same each time, so that it fails for what was changed; a long run takes others.
"""

import os

from hypothesis import HealthCheck, settings


def few(examples: int, steps: int = 50) -> settings:
    """Settings for so many examples, for state machines of so many steps, or for `$TEST_EXAMPLES` examples if set."""
    asked = os.environ.get("TEST_EXAMPLES")
    return settings(
        max_examples=int(asked or examples),
        derandomize=not asked,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
