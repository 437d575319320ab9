"""The trainer: its training loop, state, data and checkpoints."""

from ..core import ModelObject as ModelObject
from ..distributed import ShardingRules as ShardingRules
from ..distributed import make_mesh as make_mesh
from ._callbacks import Callback as Callback
from ._callbacks import JsonlLogger as JsonlLogger
from ._callbacks import Profile as Profile
from ._callbacks import Scalars as Scalars
from ._callbacks import TensorBoard as TensorBoard
from ._callbacks import TrainerView as TrainerView
from ._checkpoint import Checkpoints as Checkpoints
from ._data import array_data as array_data
from ._ema import ema as ema
from ._events import Event as Event
from ._events import LossLines as LossLines
from ._events import Record as Record
from ._monitors import EarlyStopping as EarlyStopping
from ._monitors import ReduceOnPlateau as ReduceOnPlateau
from ._preview import analyze_naive as analyze_naive
from ._preview import analyze_step as analyze_step
from ._preview import step_job as step_job
from ._run import FitOptions as FitOptions
from ._run import Run as Run
from ._step import TrainState as TrainState
from ._stored import CheckpointBytes as CheckpointBytes
from ._stored import checkpoint_bytes as checkpoint_bytes
from ._trackers import Tracker as Tracker
from ._trainer import Trainer as Trainer
from ._weights import example_weights as example_weights

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
