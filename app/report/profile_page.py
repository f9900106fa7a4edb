"""Page of a profile folder (`ballast profile`): latency over lengths and budgets, and predictions
of held-out layers beside measured ones."""
import json

import numpy as np

from load import ReportError
from output import write_text
from plot import line, panel
from style import INK, MUTED, SERIES, seconds_unit, series

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
            found = sums.setdefault((row["budget"], key), {})
            found[row["query_tokens"]] = found.get(row["query_tokens"], 0) + row["median_s"]
    factor, unit = seconds_unit(max(max(found.values()) for found in sums.values()))
    data = []
    for i, ((budget, name), found) in enumerate(sorted(sums.items())):
        tokens = sorted(found)
        seconds = [found[n] * factor for n in tokens]
        dense = {"line": {"dash": "dash"}} if budget == 0 else {}
        data.append(line(name, tokens, seconds, series(i) if budget else INK, marks=True, **dense))
    return [
        panel(
            "Attention, forward and backward, by budget (key blocks a query)",
            data,
            "tokens of the segment",
            f"attention of a layer ({unit})",
            height=380,
            xaxis={"type": "log"},
            yaxis={"type": "log"},
        )
    ]


def predictions(profile):
    """Held-out layers: predicted over measured time of three predictors (SparseBalance Figure
    6)."""
    points = profile["held_out"]
    if not points:
        return None
    measured = np.array([p["measured_s"] for p in points])
    factor, unit = seconds_unit(measured.max())
    packed = np.array([len(p["lengths"]) > 1 for p in points])
    ends = np.array([measured.min(), measured.max()]) * factor
    panels = []
    for (key, name, error), colour in zip(PREDICTORS, SERIES):
        predicted = np.array([p[key] for p in points])
        data = [line("equal", ends, ends, MUTED)]
        for chosen, symbol, label in (
            (~packed, "circle", "one segment"),
            (packed, "square", "packs"),
        ):
            marks = line(label, measured[chosen] * factor, predicted[chosen] * factor, colour)
            marks.update(mode="markers", marker={"color": colour, "symbol": symbol, "size": 6})
            data.append(marks)
        panels.append(
            panel(
                f"{name}: median error {100 * profile[error]:.1f} %",
                data,
                f"measured ({unit})",
                f"predicted ({unit})",
                xaxis={"type": "log"},
                yaxis={"type": "log"},
            )
        )
    return panels


def write(path, profile, folder):
    """Writes report.html and its figures to `folder`; returns the page's path."""
    from page import Panels, document, escape

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
    panels = Panels()
    body = "".join(panels.figure(name, f, caption) for f, name, caption in figures if f is not None)
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
        '<h3>Links</h3><div class="scroll"><table><thead><tr><th'
        ' class="text">level</th><th>latency (us)</th><th>GB/s each'
        f" way</th></tr></thead><tbody>{rows}</tbody></table></div>"
        if rows
        else ""
    )
    note = f'<div class="notes"><b>Note</b><ul>{notes}</ul></div>' if notes else ""
    measured_on = f'<h3>Measured on</h3><div class="scroll"><table>{identity}</table></div>'
    text = document(
        "Profile of one layer",
        profile["identity"].get("hardware", ""),
        "",
        note + body + links + measured_on,
        panels,
    )
    target = folder / "report.html"
    write_text(target, text)
    return target
