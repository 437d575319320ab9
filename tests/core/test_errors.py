from __future__ import annotations

import inspect
import pickle

from lowtide.core import ConfigError, LowtideError, OutOfMemoryError, _errors

CLASSES = [cls for _, cls in inspect.getmembers(_errors, inspect.isclass) if issubclass(cls, LowtideError)]


def test_a_message_has_code_expected_got_and_hint_in_order() -> None:
    error = ConfigError("rank has to be at least 1", expected=">= 1", got=0, hint="try 8")
    assert str(error).splitlines() == [
        "[LT003] rank has to be at least 1",
        "  expected: >= 1",
        "  got: 0",
        "hint: try 8",
    ]
    assert error.hint == "try 8"


def test_what_is_not_given_is_not_printed() -> None:
    assert str(LowtideError("plain")) == "[LT000] plain"
    assert LowtideError("plain").hint is None


def test_falsy_values_are_printed() -> None:
    assert "got: 0" in str(ConfigError("bad", got=0))
    assert "got: False" in str(ConfigError("bad", got=False))


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(codes) == len(set(codes))


def test_users_catch_value_error() -> None:
    for cls in CLASSES:
        if cls is not LowtideError:
            assert issubclass(cls, MemoryError if cls is OutOfMemoryError else ValueError), cls


def test_errors_travel_between_processes() -> None:
    error = ConfigError("wrong", expected=1, got=[2], hint="mend it")
    sent = pickle.loads(pickle.dumps(error))
    assert (type(sent), str(sent), sent.got, sent.hint) == (ConfigError, str(error), [2], "mend it")
