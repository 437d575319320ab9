"""Training data: files of text and records, chat templates, tokenisation and packing."""

from ._chat import ChatTemplate as ChatTemplate
from ._chat import chat_prompts as chat_prompts
from ._chat import chat_turn as chat_turn
from ._chat import load_chat_template as load_chat_template
from ._normalize import Example as Example
from ._normalize import parse_columns as parse_columns
from ._normalize import parse_record as parse_record
from ._pack import DataReport as DataReport
from ._pack import RecordData as RecordData
from ._pack import best_fit as best_fit
from ._pack import evaluation_data as evaluation_data
from ._pack import record_data as record_data
from ._read import is_records as is_records
from ._read import read_records as read_records
