"""Decks of inputs/ at a size that eight host ranks train in seconds: lengths divided by one factor,
a small model, no GPU, no files.  What decides a plan scales along: costs of a token and of a pair,
blocks, budgets and chunks; ranks, samples and layers stay where eight ranks allow it."""
import json
import math
import tomllib

RANKS = 8
LONGEST = 512  # tokens of the longest sample, about
SPARSE_LONGEST = 2048  # blocks of sparse patterns have 64 tokens at least
STEPS = 20
SAMPLES = 20000
STEP_TOKENS = 2048  # of decks that state none
ALONE_TOKENS = 512  # likewise where every short sample is a micro-batch

TOKENS = {  # keys that count tokens: key -> least
    "data.bin_tokens": 1,
    "data.lengths": 1,
    "data.max_tokens": 0,
    "data.min_tokens": 0,
    "batching.micro_batch_tokens": 1,
    "batching.global_tokens": 1,
    "batching.groups": 1,
    "batching.select_lengths": 1,
    "chunk.tokens": 1,
    "chunk.window_tokens": 1,
    "chunk.search_tokens": 1,
    "curriculum.max_tokens": 0,
    "attention.generated_band_tokens": 1,
    "attention.generated_columns": 1,
    "attention.max_columns": 0,
    "ring.stripe": 1,
    "profile.lengths": 1,
}
PER_TOKEN = [f"costs.{name}_token_s" for name in ("forward", "exchange", "ring_hop", "stage_hop")]
LISTS = ("data.bin_tokens", "batching.groups", "batching.select_lengths", "chunk.search_tokens")
PRESET_LAYERS = {"llama3.1-8b": 32, "qwen2.5-0.5b": 24, "qwen2.5-3b": 36, "qwen2.5-7b": 28}
PRESET_LAYERS |= {"qwen3-8b": 36}
BLOCK = 64  # least block of sparse patterns


def flat(table, before=""):
    """Nested tables as {"block.key": value}."""
    values = {}
    for key, value in table.items():
        if isinstance(value, dict):
            values.update(flat(value, f"{before}{key}."))
        else:
            values[before + key] = value
    return values


def deck_cases(path):
    """[(name, all its keys)] of a deck; the name is "" where it has no cases."""
    with open(path, "rb") as file:
        table = tomllib.load(file)
    cases = table.pop("case", [{}])
    base = flat(table)
    return [
        (case.get("name", ""), base | {k: v for k, v in flat(case).items() if k != "name"})
        for case in cases
    ]


def ascending(values):
    for i in range(1, len(values)):
        values[i] = max(values[i], values[i - 1] + 1)
    return values


def divided(value, factor, least, key):
    if isinstance(value, list):
        values = [divided(v, factor, least, "") for v in value]
        return ascending(values) if key in LISTS else values
    return 0 if value == 0 else max(least, 1, round(value / factor))


def recomputed(layers, share):
    if isinstance(layers, list):
        return [recomputed(n, share) for n in layers]
    return layers if layers < 0 else int(layers * share)


def longest(deck):
    lengths = deck.get("data.bin_tokens") or deck.get("data.lengths") or [deck["data.max_tokens"]]
    return min(max(lengths), deck.get("data.max_tokens") or max(lengths))


class Shrunk:
    """One case of a deck, made small."""

    def __init__(self, deck, steps=STEPS):
        self.deck = dict(deck)
        self.files()
        self.mesh()
        self.model()
        self.tokens()
        self.run(steps)

    def files(self):
        """Data that only the deck's owner has, and the machine's headers, become drawn lengths."""
        d = self.deck
        for key in ("model.weights", "dpo.reference", "data.path", "profile.table"):
            d.pop(key, None)
        if d.get("loss.kind") == "dpo":
            d.update({"dpo.reference_free": True, "data.max_tokens": 4096})
        source = d.get("data.source", "files")
        if d.pop("data.lengths_file", None):
            source = "files"
            d["data.max_tokens"] = max(d["batching.groups"])
        if source in ("files", "megatron", "hdf5"):
            for key in ("data.paths", "data.extensions"):
                d.pop(key, None)
            most = d.setdefault("data.max_tokens", d.get("batching.micro_batch_tokens", 4096))
            d["data.source"] = "distribution"
            d["data.bin_tokens"] = [most // 64, most // 16, most // 4, most]
            d["data.bin_share"] = [4, 3, 2, 1]
            if d.get("data.min_tokens", 1) >= most:
                d["data.bin_tokens"], d["data.bin_share"] = [most - 1, most], [0.0, 1.0]
                d["data.min_tokens"] = 0
        if d.get("data.source") == "distribution":
            d["data.samples"] = min(d.get("data.samples", SAMPLES), SAMPLES)

    def mesh(self):
        """Eight ranks: what is more is taken from the widest, what is less is data parallel."""
        d = self.deck
        names = [f"mesh.{n}" for n in ("pp", "cp_outer", "cp_inner", "sp")]
        degrees = {n: d.get(n, 1) for n in names}
        while math.prod(degrees.values()) > RANKS:
            widest = max(names, key=lambda n: degrees[n])
            degrees[widest] //= 2
        d.update(degrees)
        d["mesh.dp"] = RANKS // math.prod(degrees.values())
        nodes = d.get("mesh.ranks_per_node")
        if nodes:
            d["mesh.ranks_per_node"] = min(nodes, degrees["mesh.cp_inner"] * degrees["mesh.sp"])
        if "batching.group_ranks" in d:
            d["batching.group_ranks"] = [min(r, d["mesh.dp"]) for r in d["batching.group_ranks"]]
        if "batching.select_ranks" in d:
            kept = [r for r in d["batching.select_ranks"] if r <= d["mesh.dp"]]
            d["batching.select_ranks"] = kept

    def model(self):
        d = self.deck
        heads = min(d.get("model.query_heads", 8), 8)
        if d.get("model.preset", "custom") != "custom":
            heads = 8
        if heads % d["mesh.sp"]:
            heads = d["mesh.sp"]
        deep = d.get("model.layers", PRESET_LAYERS.get(d.get("model.preset"), 2))
        layers = max(min(deep, 4), d["mesh.pp"])
        if d.get("attention.pattern") == "by_head":
            layers, heads = d["model.layers"], d["model.query_heads"]
        for key in ("recompute.layers", "batching.group_recompute"):
            if key in d:
                d[key] = recomputed(d[key], layers / deep)
        for key in [k for k in d if k.startswith("model.")]:
            del d[key]
        head_dim = 4
        d.update(
            {
                "model.layers": layers,
                "model.hidden": heads * head_dim,
                "model.intermediate": 16,
                "model.query_heads": heads,
                "model.kv_heads": 1 if d.get("attention.pattern") != "by_head" else heads,
                "model.head_dim": head_dim,
                "model.vocabulary": 256,
            }
        )

    def tokens(self):
        d = self.deck
        if d.get("data.source") == "needle":
            return
        sparse = "attention.index" in d or d.get("attention.pattern", "dense") != "dense"
        most = SPARSE_LONGEST if sparse else LONGEST
        factor = 2 ** max(0, math.ceil(math.log2(longest(d) / most)))
        for key, least in TOKENS.items():
            if key in d:
                d[key] = divided(d[key], factor, least, key)
        self.costs(factor)
        if sparse:
            self.blocks(factor)

    def costs(self, factor):
        d = self.deck
        for key in PER_TOKEN:
            if key in d:
                d[key] *= factor
        if "costs.forward_pair_s" in d:
            d["costs.forward_pair_s"] *= factor * factor

    def blocks(self, factor):
        """Blocks of 64 tokens where the deck's would be smaller; budgets count the larger ones."""
        d = self.deck
        block = d.get("attention.moba_block", 256)
        made = max(BLOCK, block // factor)
        d["attention.moba_block"] = made
        d["ring.stripe"] = BLOCK
        share = made * factor / block
        if "chunk.tokens" in d:
            d["chunk.tokens"] = max(BLOCK, d["chunk.tokens"] // BLOCK * BLOCK)
        for key in ("attention.moba_top_k", "attention.max_slashes", "dst.base_budget"):
            if d.get(key):
                d[key] = max(1, round(d[key] / share))
        if "dst.simulated_coverage" in d:
            blocks = [max(1, round(v / share)) for v in d["dst.simulated_coverage"]]
            d["dst.simulated_coverage"] = ascending(blocks)

    def run(self, steps):
        d = self.deck
        if d.get("batching.scope") == "epoch":
            d["batching.scope"] = "step"
        if "batching.global_tokens" not in d and "batching.global_samples" not in d:
            alone = d.get("batching.method") == "none"
            d["batching.global_tokens"] = ALONE_TOKENS if alone else STEP_TOKENS
        for key in [k for k in d if k.startswith(("checkpoint.", "eval."))]:
            del d[key]
        d.update(
            {
                "run.steps": steps,
                "run.backend": "host",
                "run.precision": "fp32",
                "checkpoint.at_end": False,
                "trace.enabled": True,
                "trace.plans_every": 1,
                "trace.recall_every": 0,
            }
        )


def text_of(deck):
    """A deck's TOML, without cases."""
    blocks = {}
    for key, value in deck.items():
        block, name = key.split(".")
        blocks.setdefault(block, []).append(f"{name} = {json.dumps(value)}")
    return "\n".join(f"[{block}]\n" + "\n".join(rows) for block, rows in blocks.items()) + "\n"
