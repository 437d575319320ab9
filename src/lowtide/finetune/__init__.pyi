"""The fine-tuning job: its configuration, data, run folders and files."""

from ._config import FinetuneConfig as FinetuneConfig
from ._config import config_from_dict as config_from_dict
from ._config import config_to_toml as config_to_toml
from ._config import flag_of as flag_of
from ._config import read_config as read_config
from ._finetune import Finetune as Finetune
from ._foreign import setting_of as setting_of
from ._job import step_job as step_job
from ._page import write_report as write_report
from ._runs import open_run as open_run
from ._table import MemoryTable as MemoryTable
from ._text import TextData as TextData
from ._text import read_documents as read_documents
from ._text import text_data as text_data
