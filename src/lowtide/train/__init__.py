"""The training loop, its state, data and checkpoints, and the fine-tuning job made of them."""

from ..core import ModelObject as ModelObject
from ._callbacks import Callback as Callback
from ._callbacks import JsonlLogger as JsonlLogger
from ._callbacks import Profile as Profile
from ._callbacks import Scalars as Scalars
from ._callbacks import TensorBoard as TensorBoard
from ._checkpoint import Checkpoints as Checkpoints
from ._config import FinetuneConfig as FinetuneConfig
from ._config import config_from_dict as config_from_dict
from ._config import config_to_toml as config_to_toml
from ._config import read_config as read_config
from ._ema import ema as ema
from ._feed import array_data as array_data
from ._finetune import Finetune as Finetune
from ._monitors import EarlyStopping as EarlyStopping
from ._monitors import ReduceOnPlateau as ReduceOnPlateau
from ._preview import analyze_naive as analyze_naive
from ._preview import analyze_step as analyze_step
from ._runs import open_run as open_run
from ._sharding import ShardingRules as ShardingRules
from ._sharding import make_mesh as make_mesh
from ._step import TrainState as TrainState
from ._table import MemoryTable as MemoryTable
from ._text import TextData as TextData
from ._text import read_documents as read_documents
from ._text import text_data as text_data
from ._trainer import Trainer as Trainer
from ._weights import example_weights as example_weights

__all__ = [
    "Callback",
    "Checkpoints",
    "EarlyStopping",
    "Finetune",
    "FinetuneConfig",
    "JsonlLogger",
    "MemoryTable",
    "ModelObject",
    "Profile",
    "ReduceOnPlateau",
    "Scalars",
    "ShardingRules",
    "TensorBoard",
    "TextData",
    "TrainState",
    "Trainer",
    "analyze_naive",
    "analyze_step",
    "array_data",
    "config_from_dict",
    "config_to_toml",
    "ema",
    "example_weights",
    "make_mesh",
    "open_run",
    "read_config",
    "read_documents",
    "text_data",
]
