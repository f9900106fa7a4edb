"""Which keys of the deck may mend what a run loses: candidates, for the simulator to judge."""
from dataclasses import dataclass

LEAST_LOSS = 0.03  # share of the ranks' time below which nothing is said


@dataclass
class Change:
    settings: dict  # "block.key" -> value
    because: str
    gain: float = None  # of tokens per second, by the simulator; None: it gave no answer
    step_s: tuple = ()  # simulated, as it is and with the change
    bytes: tuple = ()  # of the fullest rank, likewise
    unanswered: str = ""  # why there is no gain

    def text(self):
        return " ".join(f"{key}={value}" for key, value in self.settings.items())


def candidates(a, losses):
    """Changes worth asking about; `losses`: category -> share of the ranks' time."""
    deck, mesh = a.run.deck, a.run.first_trace.last.mesh
    found = []
    if 1 - a.pop[0] > LEAST_LOSS:
        found += _balance(a, deck, mesh)
    cp = mesh.get("cp_outer", 1) * mesh.get("cp_inner", 1)
    if cp > 1 and losses.get("ring wait", 0) > LEAST_LOSS:
        found += _ring(deck, mesh, cp)
    if mesh.get("pp", 1) > 1 and a.bubble_ratio > LEAST_LOSS:
        found += _pipeline(deck, mesh)
    # A trace does not tell what a backward makes again from the rest of it.
    if deck.get("recompute.mode", "none") != "none":
        fewer = {"full": "selective", "selective": "none"}[deck["recompute.mode"]]
        found.append(Change({"recompute.mode": fewer}, "recomputation takes time"))
    if losses.get("host copies", 0) > LEAST_LOSS and deck.get("chunk.offload", "none") != "none":
        found.append(Change({"chunk.offload": "none"}, "computation waits for copies to the host"))
    if losses.get("sequence exchange", 0) > LEAST_LOSS and mesh.get("sp", 1) > 1:
        other = {"mesh.sp": 1, "mesh.cp_inner": mesh.get("cp_inner", 1) * mesh["sp"]}
        found.append(Change(other, "all-to-alls of heads take time; a ring hides its hops"))
    return [c for c in found if any(deck.get(k) != v for k, v in c.settings.items())]


def _balance(a, deck, mesh):
    because = "ranks differ in useful time"
    found = []
    if mesh.get("dp", 1) > 1:
        if deck.get("batching.method") != "balanced":
            found.append(Change({"batching.method": "balanced"}, because))
        if deck.get("batching.window", 1) == 1:
            found.append(Change({"batching.window": 4}, because + " and steps in work"))
    if (a.worked == 0).any() and deck.get("batching.micro_batch_tokens", 0) >= 2:
        half = deck["batching.micro_batch_tokens"] // 2
        found.append(Change({"batching.micro_batch_tokens": half}, "ranks have no micro-batch"))
    return found


def _ring(deck, mesh, cp):
    found = []
    for layout in ("document_zigzag", "zigzag", "striped"):
        if deck.get("ring.layout") != layout:
            found.append(Change({"ring.layout": layout}, "ring steps wait for their slowest rank"))
    heads = deck.get("model.query_heads", 0)
    if heads and heads % (cp * mesh.get("sp", 1)) == 0:
        ulysses = {"mesh.sp": cp * mesh.get("sp", 1), "mesh.cp_outer": 1, "mesh.cp_inner": 1}
        found.append(Change(ulysses, "rings wait; heads can be exchanged for sequence"))
    if mesh.get("cp_inner", 1) % 2 == 0:
        halved = {"mesh.cp_inner": mesh["cp_inner"] // 2, "mesh.dp": 2 * mesh.get("dp", 1)}
        found.append(Change(halved, "rings wait; shorter ones have fewer hops"))
    return found


def _pipeline(deck, mesh):
    because = "stages wait for each other"
    found = [
        Change({"pipeline.schedule": schedule}, because)
        for schedule in ("zero_bubble", "state_aware_1f1b", "1f1b")
        if deck.get("pipeline.schedule", "1f1b") != schedule
    ]
    if mesh["pp"] % 2 == 0:
        halved = {"mesh.pp": mesh["pp"] // 2, "mesh.dp": 2 * mesh.get("dp", 1)}
        found.append(Change(halved, because + "; fewer stages have fewer bubbles"))
    smaller = deck.get("batching.micro_batch_tokens", 0) // 2
    if smaller:
        found.append(
            Change({"batching.micro_batch_tokens": smaller}, "more micro-batches fill a pipeline")
        )
    return found
