"""The trainer: its training loop, state, data and checkpoints."""

from ..core import ModelObject as ModelObject
from ..distributed import ShardingRules as ShardingRules
from ..distributed import make_mesh as make_mesh
from ._callbacks import Callback as Callback
from ._callbacks import EarlyStopping as EarlyStopping
from ._callbacks import Profile as Profile
from ._callbacks import ReduceOnPlateau as ReduceOnPlateau
from ._callbacks import TrainerView as TrainerView
from ._compilation import analyze_naive as analyze_naive
from ._compilation import analyze_step as analyze_step
from ._compilation import step_job as step_job
from ._data import array_data as array_data
from ._data import example_weights as example_weights
from ._events import Event as Event
from ._events import LossLines as LossLines
from ._events import Record as Record
from ._loop import FitOptions as FitOptions
from ._loop import Run as Run
from ._optimizer import ema as ema
from ._planning import plan as plan
from ._step import TrainState as TrainState
from ._trackers import JsonlLogger as JsonlLogger
from ._trackers import Scalars as Scalars
from ._trackers import TensorBoard as TensorBoard
from ._trackers import Tracker as Tracker
from ._trainer import Trainer as Trainer
from .checkpoint import CheckpointBytes as CheckpointBytes
from .checkpoint import Checkpoints as Checkpoints
from .checkpoint import checkpoint_bytes as checkpoint_bytes

__all__ = [
    "CheckpointBytes",
    "checkpoint_bytes",
    "Callback",
    "Checkpoints",
    "EarlyStopping",
    "Event",
    "FitOptions",
    "JsonlLogger",
    "LossLines",
    "ModelObject",
    "Profile",
    "Record",
    "plan",
    "ReduceOnPlateau",
    "Run",
    "Scalars",
    "ShardingRules",
    "TensorBoard",
    "Tracker",
    "TrainState",
    "TrainerView",
    "Trainer",
    "analyze_naive",
    "analyze_step",
    "array_data",
    "ema",
    "example_weights",
    "make_mesh",
    "step_job",
]
