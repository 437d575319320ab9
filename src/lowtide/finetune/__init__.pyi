"""The fine-tuning job: its configuration, data, run folders and files."""

from ._base import open_base as open_base
from ._config import FinetuneConfig as FinetuneConfig
from ._config import config_from_dict as config_from_dict
from ._config import config_to_toml as config_to_toml
from ._config import flag_of as flag_of
from ._config import read_config as read_config
from ._data import is_read_as_records as is_read_as_records
from ._data import notes_on as notes_on
from ._evaluate import TextLoss as TextLoss
from ._evaluate import batches_loss as batches_loss
from ._evaluate import text_loss as text_loss
from ._evaluate import token_stream as token_stream
from ._finetune import Finetune as Finetune
from ._foreign import setting_of as setting_of
from ._inspect import Inspection as Inspection
from ._inspect import inspect as inspect
from ._job import step_job as step_job
from ._merge import write_merged as write_merged
from ._page import write_report as write_report
from ._runs import open_run as open_run
from ._table import MemoryTable as MemoryTable
from ._text import TextData as TextData
from ._text import read_documents as read_documents
from ._text import text_data as text_data
