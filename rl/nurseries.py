"""What nurseries wrap into groups comes out as itself."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unwrapped() -> Iterator[None]:
    """Nurseries inside the block wrap errors into groups: one that is alone in them comes out as itself."""
    try:
        yield
        return
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            (error,) = error.exceptions
        if error is group:
            raise
    raise error
