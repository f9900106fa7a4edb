"""Page of a profile folder (`ballast profile`): latency over lengths and budgets, and predictions
of held-out layers beside measured ones."""
import json

import numpy as np
from matplotlib.ticker import NullFormatter

from load import ReportError
from style import INK, MUTED, SERIES, plt, seconds_unit

PREDICTORS = (
    ("table_s", "profile table", "held_out_error"),
    ("flops_s", "FLOPs alone", "flops_error"),
    ("length_s", "length alone", "length_error"),
)


def is_profile(path):
    return (path / "profile.json").is_file() and not (path / "trace").is_dir()


def load(path):
    try:
        return json.loads((path / "profile.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{path / 'profile.json'}: {error}") from error


def latency(profile):
    """Attention of one layer, forward and backward together: a line a budget."""
    sums = {}
    recompute = profile["rows"][0]["recompute"]
    for row in profile["rows"]:
        if (
            row["part"] == "attention"
            and row["prefix_tokens"] == 0
            and row["recompute"] == recompute
            and row["sp"] == 1
        ):
            key = "dense" if row["pattern"] == "dense" else f"budget {row['budget']}"
            line = sums.setdefault((row["budget"], key), {})
            line[row["query_tokens"]] = line.get(row["query_tokens"], 0) + row["median_s"]
    factor, unit = seconds_unit(max(max(line.values()) for line in sums.values()))
    figure, ax = plt.subplots(figsize=(9.6, 3.4))
    for i, ((budget, name), line) in enumerate(sorted(sums.items())):
        tokens = sorted(line)
        ax.plot(
            tokens,
            [line[n] * factor for n in tokens],
            marker="o",
            markersize=3.5,
            label=name,
            color=INK if budget == 0 else SERIES[i % len(SERIES)],
            linestyle="--" if budget == 0 else "-",
        )
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="tokens of the segment",
        ylabel=f"attention of a layer ({unit})",
        title="Attention, forward and backward, by budget (key blocks a query)",
    )
    ax.set_xscale("log", base=2)
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def predictions(profile):
    """Held-out layers: predicted over measured time of three predictors (SparseBalance Figure
    6)."""
    points = profile["held_out"]
    if not points:
        return None
    measured = np.array([p["measured_s"] for p in points])
    factor, unit = seconds_unit(measured.max())
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.4), sharex=True, sharey=True)
    packed = np.array([len(p["lengths"]) > 1 for p in points])
    for ax, (key, name, error), colour in zip(axes, PREDICTORS, SERIES):
        predicted = np.array([p[key] for p in points])
        ends = np.array([measured.min(), measured.max()]) * factor
        ax.plot(ends, ends, color=MUTED, linewidth=1)
        for chosen, marker, label in ((~packed, "o", "one segment"), (packed, "s", "packs")):
            ax.plot(
                measured[chosen] * factor,
                predicted[chosen] * factor,
                marker,
                markersize=4,
                color=colour,
                alpha=0.8 if marker == "o" else 0.45,
                label=label,
            )
        ax.set(
            xscale="log",
            yscale="log",
            xlabel=f"measured ({unit})",
            title=f"{name}: median error {100 * profile[error]:.1f} %",
        )
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel(f"predicted ({unit})")
    axes[0].legend(loc="upper left")
    return figure


def write(path, profile, folder):
    """Writes report.html and its figures to `folder`; returns the page's path."""
    from page import CSS, escape, figure_html, render

    folder.mkdir(parents=True, exist_ok=True)
    figures = [
        (
            latency(profile),
            "latency",
            "Medians of one layer's attention; the dashed line is dense attention.",
        ),
        (
            predictions(profile),
            "predictions",
            (
                "Whole layers that the table did not see, alone and packed. FLOPs alone: FLOPs over"
                " one rate; length alone: a curve of the tokens; both fitted to the table's own"
                " layers."
            ),
        ),
    ]
    body = "".join(
        figure_html(render(f, folder / f"{name}.png"), caption, name)
        for f, name, caption in figures
        if f is not None
    )
    identity = "".join(
        f'<tr><td class="text">{escape(k)}</td><td class="text">{escape(v)}</td></tr>'
        for k, v in profile["identity"].items()
    )
    notes = "".join(f"<li>{escape(n)}</li>" for n in profile["notes"])
    rows = "".join(
        "<tr><td"
        f" class=\"text\">{escape(link['level'])}</td><td>{1e6 * link['latency_s']:.2f}</td>"
        f"<td>{1e-9 * link['bytes_per_s']:.2f}"
        "</td></tr>"
        for link in profile["links"]
    )
    links = (
        '<h3>Links</h3><table><thead><tr><th class="text">level</th><th>latency (us)</th><th>GB/s'
        f" each way</th></tr></thead><tbody>{rows}</tbody></table>"
        if rows
        else ""
    )
    note = f'<div class="notes"><b>Note</b><ul>{notes}</ul></div>' if notes else ""
    text = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Ballast:'
        f" profile</title><style>{CSS}</style></head>\n<body><header><div><h1>Profile of one"
        f' layer</h1><p>{escape(profile["identity"].get("hardware", ""))}</p></div></header>'
        f"<main>\n{note}{body}{links}<h3>Measured"
        f" on</h3><table><tbody>{identity}</tbody></table></main></body></html>\n"
    )
    target = folder / "report.html"
    target.write_text(text, encoding="utf-8")
    return target
