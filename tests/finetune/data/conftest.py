import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Keep tokenised data of a test to itself."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path_factory.mktemp("cache")))
