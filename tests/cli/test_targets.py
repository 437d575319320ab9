"""`lowtide targets`: the catalogue, with the origin of every figure."""

from __future__ import annotations

import json
import re
from typing import Any

from lowtide import memory


def test_every_target_is_a_row_and_every_figure_has_an_origin(lowtide: Any) -> None:
    status, printed, _ = lowtide("targets", "--here")
    assert status == 0
    table, _, origins = printed.partition("Sources of the figures")
    for goal in memory.targets():
        assert re.search(rf"^{goal.name} +{goal.num_devices} ", table, flags=re.MULTILINE)
    assert "…" not in table
    numbers = re.findall(r"^ *(\d+)  ", origins, flags=re.MULTILINE)
    assert numbers == [str(n) for n in range(1, len(numbers) + 1)]
    row = next(line for line in table.splitlines() if line.startswith("v5e:1x1"))
    assert re.search(r"15.75 GiB +\d+ +16.00 GiB +\d+", row)


def test_json_is_the_catalogue_itself(lowtide: Any) -> None:
    status, printed, _ = lowtide("targets", "--json")
    assert status == 0
    found = {target["name"]: target for target in json.loads(printed)}
    assert list(found) == [goal.name for goal in memory.targets() if goal.name not in ("here", "cpu")]
    assert found["v5e:1x1"]["device_bytes"] == 16_911_433_728
    assert any(source.startswith("device_bytes: ") for source in found["v5e:1x1"]["sources"])
