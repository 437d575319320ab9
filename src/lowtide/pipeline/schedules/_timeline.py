"""A schedule with start and end times: plain data, and the figures that follow from them."""

from __future__ import annotations

import dataclasses

from ._actions import Kind
from ._costs import Costs
from ._schedule import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """When each action of a schedule runs, and how much memory each rank holds."""

    schedule: Schedule
    costs: Costs
    """Time and memory of each action."""
    starts: tuple[tuple[float, ...], ...]
    """Start time of each action of each rank."""
    ends: tuple[tuple[float, ...], ...]
    """End time of each action. In lockstep, the last action of a rank in a tick ends with the tick."""
    busy: tuple[float, ...]
    """Time that each rank computes."""
    peaks: tuple[float, ...]
    """Largest amount of memory that each rank holds at one time, in the unit of `Costs`. An action holds the memory
    that it frees until it ends."""
    num_transfers: int
    """Number of activations and gradients that one rank sends to another."""
    num_ticks: int | None = None
    """Number of ticks in lockstep; None for asynchronous ranks."""

    @property
    def makespan(self) -> float:
        """Time from the start of the first action to the end of the last one."""
        return max(ends[-1] for ends in self.ends if ends)

    @property
    def spans(self) -> tuple[float, ...]:
        """For each rank, time from the start of its first action to the end of its last one.

        When batches follow each other, this is the time that a rank spends on one batch.
        """
        return tuple(e[-1] - s[0] if s else 0.0 for s, e in zip(self.starts, self.ends, strict=True))

    @property
    def bubble(self) -> float:
        """Time that the busiest rank waits in one batch."""
        return self.makespan - max(self.busy)

    @property
    def steady_bubble(self) -> float:
        """Largest time that a rank waits when batches follow each other: its span minus the time that it computes.

        The papers call this the bubble of the "longest stage".
        """
        return max(span - busy for span, busy in zip(self.spans, self.busy, strict=True))

    @property
    def utilization(self) -> float:
        """Fraction of the total time of all ranks in which they compute."""
        return sum(self.busy) / (len(self.busy) * self.makespan)

    def memory(self, rank: int) -> tuple[list[float], list[float]]:
        """Return the memory of a rank over time: the times of its changes, and the new values.

        A forward pass takes its memory at its start. A backward pass frees memory at its end.
        """
        times, values, memory = [0.0], [0.0], 0.0
        for action, start, end in zip(self.schedule.orders[rank], self.starts[rank], self.ends[rank], strict=True):
            memory += self.costs.kept(action)
            time = start if action.kind is Kind.FORWARD else end
            if time == times[-1]:  # memory is freed and taken at the same time
                values[-1] = memory
            else:
                times.append(time)
                values.append(memory)
        return times, values
