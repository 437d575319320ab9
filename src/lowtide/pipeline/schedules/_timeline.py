"""A schedule in time: plain data and what follows from it."""

from __future__ import annotations

import dataclasses

from ._actions import Kind
from ._costs import Costs
from ._schedule import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """When each action of a schedule runs, and what each rank keeps."""

    schedule: Schedule
    """What ran."""
    costs: Costs
    """What its actions cost."""
    starts: tuple[tuple[float, ...], ...]
    """When each action of each rank began."""
    ends: tuple[tuple[float, ...], ...]
    """When it ended; in lockstep, with its tick."""
    busy: tuple[float, ...]
    """Time that each rank computes."""
    peaks: tuple[float, ...]
    """The most memory that each rank keeps at a time, in the unit of `Costs`; what an action frees is there while it
    runs."""
    num_transfers: int
    """Activations and gradients that go from one rank to another."""
    num_ticks: int | None = None
    """In lockstep."""

    @property
    def makespan(self) -> float:
        """Time from the first action's begin to the last one's end."""
        return max(ends[-1] for ends in self.ends if ends)

    @property
    def spans(self) -> tuple[float, ...]:
        """Of each rank, from its first action's begin to its last one's end: what it takes when batches follow."""
        return tuple(e[-1] - s[0] if s else 0.0 for s, e in zip(self.starts, self.ends, strict=True))

    @property
    def bubble(self) -> float:
        """The time that the busiest rank waits in one batch."""
        return self.makespan - max(self.busy)

    @property
    def steady_bubble(self) -> float:
        """The time that a rank waits when batches follow: of the rank with the longest span, what it does not compute.

        The papers' "longest stage".
        """
        return max(span - busy for span, busy in zip(self.spans, self.busy, strict=True))

    @property
    def utilization(self) -> float:
        """Part of all ranks' time in which they compute."""
        return sum(self.busy) / (len(self.busy) * self.makespan)

    def memory(self, rank: int) -> tuple[list[float], list[float]]:
        """Return what a rank keeps over time: when it changes, and to what.

        A forward pass counts from its begin, what a backward pass frees until its end.
        """
        times, values, held = [0.0], [0.0], 0.0
        for action, start, end in zip(self.schedule.orders[rank], self.starts[rank], self.ends[rank], strict=True):
            held += self.costs.kept(action)
            time = start if action.kind is Kind.FORWARD else end
            if time == times[-1]:  # freed and taken at one moment
                values[-1] = held
            else:
                times.append(time)
                values.append(held)
        return times, values
