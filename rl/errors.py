"""What can go wrong on the learning side, one type for each boundary. Imports nothing: any process can name them.

`LearnerError` and its subclasses carry a message for a person, saying what to do. Everything else that escapes the
learner is a fault of the program.
"""


class LearnerError(Exception):
    """The learner could not do what was asked. The message says what to change."""


class ModelError(LearnerError):
    """The model cannot be found, reached or used."""


class PromptError(LearnerError):
    """This task cannot be shown to this model (too long, or its chat template refuses it); others may be."""


class TrainingError(LearnerError):
    """The update failed. Policy and optimiser are as they were before it."""


class OutOfMemory(LearnerError):
    """Memory ran out even with the smallest batch. Policy and optimiser are as they were before."""


class EngineError(LearnerError):
    """The inference engine failed, or does not sample from the current policy. The policy is as it was."""


class CheckpointError(LearnerError):
    """A saved policy cannot be loaded: damaged, or made with another model or other adapter settings."""


class AnswerError(LearnerError):
    """What was asked is done, but the answer is too long to travel."""


class Stopped(LearnerError):
    """The work was stopped on request. Policy and optimiser are as they were before it."""


class RankLost(Exception):
    """One of the processes that share the learning step is gone, or does not do what the others do.

    Not a LearnerError: no learner can go on after it, only another one from the last checkpoint.
    """
