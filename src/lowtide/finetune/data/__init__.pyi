"""Data that people have: records of several kinds and formats, chat templates, packing."""

from ._chat import ChatTemplate as ChatTemplate
from ._chat import chat_prompts as chat_prompts
from ._chat import chat_turn as chat_turn
from ._chat import load_chat_template as load_chat_template
from ._packing import best_fit as best_fit
from ._readers import is_records as is_records
from ._readers import read_records as read_records
from ._records import DataReport as DataReport
from ._records import RecordData as RecordData
from ._records import evaluation_data as evaluation_data
from ._records import record_data as record_data
from ._schema import Example as Example
from ._schema import parse_columns as parse_columns
from ._schema import parse_record as parse_record
