"""Group delivery logs into attempts, split each into passes, and choose the records that count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..loader.errors import DatasetError
from .coverage import Standing
from .delivery_records import Delivered, Log


def sort_attempts(logs: Sequence[Log]) -> list[list[Log]]:
    """The logs grouped by launch, in order of start; one a rank.

    Raises:
        DatasetError: processes of one rank, which hold parts of one model, got different samples.
    """
    groups: list[list[Log]] = []
    newest: dict[str, list[Log]] = {}  # by launch, also where others came in between: hosts' clocks may differ
    for log in sorted(logs, key=lambda log: int(log.header["started_ns"])):
        launch, group = log.header["launch"], newest.get(log.header["launch"], [])
        is_same = all(other.header["world_size"] == log.header["world_size"] for other in group)
        if not group or not is_same or any(_place(other) == _place(log) for other in group):
            group = newest[launch] = []
            groups.append(group)
        group.append(log)
    return [_without_peers(group) for group in groups]


def _place(log: Log) -> tuple[int, int | None]:
    """The rank, and the process: several hold parts of one model where it is cut by tensor or pipeline."""
    return int(log.header["rank"]), log.header.get("process")


def _without_peers(group: Sequence[Log]) -> list[Log]:
    """One log of each rank, the longest of its processes; the others must have got the beginning of the same."""
    kept: dict[int, Log] = {}
    for log in group:
        rank = int(log.header["rank"])
        other = kept.get(rank, log)
        for one, two in zip(log.records, other.records, strict=False):
            if (one.epoch, one.start, one.stop) != (
                two.epoch,
                two.start,
                two.stop,
            ) or one.ids.tolist() != two.ids.tolist():
                raise DatasetError(
                    f"processes {log.header.get('process')} and {other.header.get('process')} are both rank {rank} of "
                    f"{log.header['world_size']}, and got different samples at position {one.start:,} of epoch "
                    f"{one.epoch:,} ({two.start:,} of {two.epoch:,}): processes that hold parts of one model must take "
                    "the same batches"
                )
        kept[rank] = max(other, log, key=lambda each: len(each.records))
    return list(kept.values())


def join_dealt(logs: Sequence[Log]) -> tuple[list[Log], list[Delivered]]:
    """Join the logs of loaders whose batches were dealt out to one of all batches in order; and what came again.

    Who died with a batch has logged it, and so has whoever got it afterwards: it counts once.
    """
    dealt = [log for log in logs if log.is_dealt]
    if not dealt:
        return list(logs), []
    counted: dict[tuple[int, int, int, bytes], Delivered] = {}
    again: list[Delivered] = []
    for log in sorted(dealt, key=lambda log: int(log.header["started_ns"])):
        for record in log.records:
            key = record.epoch, record.start, record.stop, record.ids.tobytes()
            if key in counted:
                again.append(record)
            else:
                counted[key] = record
    first = min(dealt, key=lambda log: int(log.header["started_ns"]))
    header = {**first.header, "rank": 0, "world_size": 1}
    records = [counted[key] for key in sorted(counted)]
    sizes = [size for log in dealt for size in log.sizes]
    return [*(log for log in logs if not log.is_dealt), Log(header, records, sizes)], again


def settle(groups: Sequence[Sequence[Log]]) -> tuple[list[Standing], list[Delivered]]:
    """The records that count, and those that were handed out again: by their own rank, or by a later attempt's ranks.

    A rank may go back alone, as one that looks at a batch before it trains. What it got before it loaded a state that
    was reached elsewhere, as one that looks at a batch before it resumes, was handed out again, too.
    """
    counted: list[Standing] = []
    replayed: list[Delivered] = []
    later: list[tuple[int, int]] = []  # where the later attempts began
    for number, group in reversed(list(enumerate(groups))):
        began = []
        for log in group:
            until = min(later, default=None)
            records, left = _follow_loads(log, [other for before in groups[:number] for other in before])
            replayed += left
            for record in reversed(records):
                here = (record.epoch, record.start)
                stands = until is None or here < until
                if stands and record.is_skip and until is not None and until[0] == record.epoch:
                    record = replace(record, stop=min(record.stop, until[1]))
                if stands:
                    header = log.header
                    counted.append(Standing(number, int(header["rank"]), int(header["world_size"]), record))
                else:
                    replayed.append(record)
                until = here if stands else until
            began += [min((record.epoch, record.start) for record in records)] if records else []
        later += began
    return counted, replayed


def _follow_loads(log: Log, earlier: Sequence[Log]) -> tuple[list[Delivered], list[Delivered]]:
    """The records of a log that lead up to the states that were loaded in it, and on from there; and all others.

    Of a state that no log reaches, what came before it is taken to lead there.
    """
    kept: list[Delivered] = list(log.records)
    left: list[Delivered] = []
    others = [record for other in earlier for record in other.records] if log.loads else []
    until = len(kept) + 1
    for count, epoch, position in reversed(log.loads):
        if count >= until:
            continue  # nothing is kept of what followed it
        before, after = kept[:count], kept[count:]
        ended = max((record.stop for record in (*others, *log.records[:count]) if record.epoch == epoch - 1), default=0)

        def leads(record: Delivered, here: tuple[int, int] = (epoch, position), ended: int = ended) -> bool:
            is_end = not here[1] and record.epoch == here[0] - 1 and record.stop + max(1, record.batch) > ended
            return is_end or (here[1] > 0 and (record.epoch, record.stop) >= here)

        if any(map(leads, before)) or any(map(leads, others)):
            while before and not leads(before[-1]):
                left.append(before.pop())
        kept, until = before + after, len(before)
    return kept, left


def split_passes(group: Sequence[Log], *, at_loads: bool = False) -> list[tuple[int, list[Delivered]]]:
    """World size and records of each stretch of an attempt in which positions only increase.

    With ``at_loads``, stretches end also where a state was loaded that is not where they had come to.
    """
    stretches: list[list[Delivered]] = []
    for log in group:
        index, last, ended = 0, (-1, -1), (-1, -1)
        loads = {count: (epoch, position) for count, epoch, position in log.loads} if at_loads else {}
        for count, record in enumerate(log.records):
            here = (record.epoch, record.start)
            is_elsewhere = count > 0 and loads.get(count, ended) not in (ended, (last[0] + 1, 0))
            index += here <= last or is_elsewhere
            last, ended = here, (record.epoch, record.stop)
            while len(stretches) <= index:
                stretches.append([])
            stretches[index].append(record)
    return [(int(group[0].header["world_size"]), stretch) for stretch in stretches]
