"""Which ranks ran a step, and on which mesh: a run may be continued on another number of ranks, and
its steps are then of several worlds."""
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

import metrics
from load import parse_deck, step_plans
from style import number_ranges


@dataclass
class World:
    """The shown steps that ran on the same ranks."""

    ranks: int  # of the run, those without a trace included
    members: np.ndarray  # places in Analysis.ranks
    steps: np.ndarray  # places in Analysis.steps
    runtime: float  # seconds with at least one rank inside a step


def session_of_rank(trace, number):
    """The rank's part of the run's session of this number; its newest where it has none."""
    return next((s for s in reversed(trace.sessions) if s.number == number), trace.last)


def session_numbers(a, steps):
    """Numbers of the sessions that ran these steps; the newest where none is known."""
    numbers = np.full(len(steps), a.run.first_trace.last.number)
    # Asked about one step at a time too, so all steps are never gone through (a.steps ascends).
    at = np.searchsorted(a.steps, steps)
    known = at < len(a.steps)
    known[known] = a.steps[at[known]] == np.asarray(steps)[known]
    numbers[known] = a.session[at[known]]
    return numbers


def session_of_step(a, step):
    """The session that ran a step, as its lowest rank has it."""
    (number,) = session_numbers(a, [step])
    return session_of_number(a, number)


def session_of_number(a, number):
    """The run's session of this number, as its lowest rank has it."""
    for rank in a.ranks:
        session = session_of_rank(a.run.traces[rank], number)
        if session.number == number:
            return session
    return a.run.first_trace.last


def unplaced_steps(a):
    """Steps that hold no plan (trace.plans_every) and whose data-parallel ranks may have shared
    micro-batches: which of them did is not known."""
    planned, may_share = set(step_plans(a.run.traces)), {}
    found = []
    for step, number in zip(a.steps.tolist(), a.session.tolist()):
        if step in planned:
            continue
        if number not in may_share:
            may_share[number] = _may_share(parse_deck(session_of_step(a, step).deck))
        if may_share[number]:
            found.append(step)
    return np.array(found, int)


def _may_share(deck):
    method, ranks = deck.get("batching.method"), deck.get("batching.group_ranks")
    selected = deck.get("batching.groups_from", "deck") != "deck"
    groups = method == "hbp" and (selected or ranks is None or any(r > 1 for r in ranks))
    return deck.get("mesh.dp", 1) > 1 and (groups or method == "balanced")


def members(a):
    """[rank, step] whether the rank took part in the session that ran the step."""
    numbers = [{s.number for s in a.run.traces[rank].sessions} for rank in a.ranks]
    part = [np.isin(a.session, list(mine)) for mine in numbers]
    return np.array(part).reshape(len(a.ranks), len(a.steps))


def worlds(a, windows):
    """The worlds of the shown steps; `windows`: (session, place of the step) -> [(begin, end)]."""
    found = defaultdict(list)
    # Who takes part in a step is who takes part in its session.
    for number in np.unique(a.session[a.shown]).tolist():
        steps = np.flatnonzero(a.shown & (a.session == number))
        who = np.flatnonzero(a.members[:, steps[0]])
        found[session_of_number(a, number).ranks, tuple(who)] += steps.tolist()
    result = []
    for (ranks, who), steps in found.items():
        per_session = defaultdict(list)  # clocks of sessions have nothing to do with one another
        for s in steps:
            per_session[a.session[s]] += windows[a.session[s], s]
        runtime = sum(metrics.union_seconds(*np.array(w).T) for w in per_session.values())
        result.append(World(ranks, np.array(who, int), np.array(steps, int), runtime))
    return result


def useful_by_rank(a, world):
    """Useful seconds of its ranks over its steps."""
    return np.nansum(a.useful[np.ix_(world.members, world.steps)], axis=1)


def rank_seconds(a):
    """Of all ranks of the run, over the shown steps."""
    return sum(w.ranks * w.runtime for w in a.worlds)


def expected_useful(a):
    """Useful seconds of every rank, and what the mean rank of the same steps has of them."""
    useful, expected = np.zeros((2, len(a.ranks)))
    for world in a.worlds:
        mine = useful_by_rank(a, world)
        useful[world.members] += mine
        expected[world.members] += mine.mean()
    return useful, expected


def note(a):
    """Which steps ran on how many ranks, where that differs."""
    by_ranks = defaultdict(list)
    for world in a.worlds:
        by_ranks[world.ranks] += a.steps[world.steps].tolist()
    if len(by_ranks) < 2:
        return
    parts = sorted((min(steps), number_ranges(sorted(steps)), n) for n, steps in by_ranks.items())
    text = ", ".join(f"{steps} on {n}" for _, steps, n in parts)
    a.run.notes.append(
        f"the number of ranks changed (steps {text} ranks): every step is judged by the ranks that"
        " ran it"
    )
