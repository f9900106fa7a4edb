"""One self-contained HTML page: no network, no scripts, figures inline."""
import base64
import html
import io

import numpy as np

import tables
from analysis import summary
from figures import FIGURES, compare
from style import bytes_unit, plt, seconds_unit

CSS = """
:root { --ink: #1f2933; --muted: #64748b; --line: #e2e8f0; --soft: #f7f9fb; --accent: #2563a8; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff; font: 15px/1.55 "Inter", "Segoe UI",
  "Helvetica Neue", "Liberation Sans", Arial, sans-serif; }
main, header > div { max-width: 1120px; margin: 0 auto; padding: 0 32px; }
header { background: #15263b; color: #fff; padding: 34px 0 30px; }
header h1 { margin: 0; font-size: 27px; font-weight: 650; letter-spacing: -0.01em; }
header p { margin: 6px 0 0; color: #b6c5d8; font-size: 14px; }
nav { border-bottom: 1px solid var(--line); background: var(--soft); font-size: 14px; }
nav div { max-width: 1120px; margin: 0 auto; padding: 9px 32px; display: flex; flex-wrap: wrap; gap:
  6px 22px; }
a { color: var(--accent); text-decoration: none; } a:hover { text-decoration: underline; }
h2 { margin: 44px 0 4px; font-size: 21px; font-weight: 650; letter-spacing: -0.01em; }
h3 { margin: 34px 0 8px; font-size: 16px; font-weight: 650; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 12px;
  margin: 24px 0 8px; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px 11px; }
.tile b { display: block; font-size: 21px; font-weight: 650; line-height: 1.25;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile span { color: var(--muted); font-size: 13px; }
.notes { margin: 22px 0 0; padding: 12px 18px; border-left: 4px solid #edae49; background: #fdf6e7;
  border-radius: 0 6px 6px 0; font-size: 14px; }
.notes ul { margin: 4px 0 0; padding-left: 18px; }
figure { margin: 26px 0 6px; } figure img { display: block; max-width: 100%; height: auto; }
figcaption, .formula { color: var(--muted); font-size: 13.5px; max-width: 940px; }
figcaption { margin-top: 6px; } .formula { margin: 8px 0 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--muted); border-bottom: 1.5px solid #b8c1cc;
  padding: 5px 14px 5px 0; white-space: nowrap; }
td { text-align: right; border-bottom: 1px solid var(--line); padding: 4px 14px 4px 0; white-space:
  nowrap; }
th.text, td.text { text-align: left; } tr:last-child td { border-bottom: 0; }
tr.total td { font-weight: 600; }
details { margin: 18px 0; } summary { cursor: pointer; color: var(--accent); font-size: 14px; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 8px; padding: 14px
  16px; overflow-x: auto; font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
footer { margin: 56px 0 0; padding: 18px 0 40px; border-top: 1px solid var(--line); color:
  var(--muted); font-size: 13px; }
@media print { nav { display: none; } figure, table { break-inside: avoid; } }
"""


def escape(text):
    return html.escape(str(text), quote=True)


def render(figure, path=None):
    """PNG of a figure: written beside the page and returned for it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight", pad_inches=0.06)
    plt.close(figure)
    if path is not None:
        path.write_bytes(buffer.getvalue())
    return buffer.getvalue()


def figure_html(png, caption, alt):
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<figure><img alt="{escape(alt)}"'
        f' src="data:image/png;base64,{data}"><figcaption>{escape(caption)}</figcaption></figure>\n'
    )


def cell(value, spec):
    if isinstance(value, float) and np.isnan(value):
        return "&ndash;"
    return escape(format(value, spec) if spec and not isinstance(value, str) else value)


def table_html(table):
    formats = table.formats or ("",) * len(table.columns)
    text = [
        all(isinstance(row[c], str) for row in table.rows)
        and c == 0
        or any(isinstance(row[c], str) and row[c] and not row[c][0].isdigit() for row in table.rows)
        for c in range(len(table.columns))
    ]
    tag = [' class="text"' if t else "" for t in text]
    head = "".join(f"<th{tag[c]}>{escape(name)}</th>" for c, name in enumerate(table.columns))
    body = ""
    for r, row in enumerate(table.rows):
        if table.row_formats:
            formats = ("",) + (table.row_formats[r],) * (len(row) - 1)
        total = ' class="total"' if isinstance(row[0], str) and row[0].startswith("all") else ""
        body += (
            f"<tr{total}>"
            + "".join(f"<td{tag[c]}>{cell(v, formats[c])}</td>" for c, v in enumerate(row))
            + "</tr>\n"
        )
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    formula = f'<p class="formula">{escape(table.formula)}</p>' if table.formula else ""
    return (
        f"{title}<div"
        f' class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{formula}\n"
    )


def tiles(a):
    s = summary(a)
    shown = []
    if "loss" in s:
        shown.append((f"{s['first_loss']:.3f} \u2192 {s['loss']:.3f}", "loss, first and last step"))
    factor, unit = seconds_unit(s["step_time_s"])
    shown.append((f"{s['step_time_s'] * factor:.4g} {unit}", f"step time, mean of {s['steps']}"))
    if "tokens_per_s_per_rank" in s:
        shown.append((f"{s['tokens_per_s_per_rank']:,.0f}", "tokens / s / rank"))
    if "mfu" in s:
        shown.append((f"{100 * s['mfu']:.1f} %", "MFU"))
    shown.append((f"{100 * s['parallel_efficiency']:.1f} %", "parallel efficiency"))
    shown.append((f"{100 * s['load_balance']:.1f} %", "load balance"))
    if "worker_imbalance" in s:
        shown.append((f"{s['worker_imbalance']:.3f}", "ring worker imbalance"))
    if "peak_bytes" in s:
        factor, unit = bytes_unit(s["peak_bytes"])
        shown.append((f"{s['peak_bytes'] * factor:.3g} {unit}", "peak memory of a rank"))
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><b>{escape(v)}</b><span>{escape(k)}</span></div>' for v, k in shown
        )
        + "</div>\n"
    )


def mesh_text(a):
    trace = a.run.first_trace
    degrees = " \u00d7 ".join(
        f"{k} {v}" for k, v in sorted(trace.last.mesh.items(), key=_mesh_order) if v > 1
    )
    return degrees or "one rank"


def _mesh_order(item):
    order = ("dp", "pp", "cp_outer", "cp_inner", "sp", "tp")
    return order.index(item[0]) if item[0] in order else len(order)


def description(a):
    deck, parts = a.run.deck, [f"{a.run.ranks} ranks, {mesh_text(a)}"]
    for key in ("model.preset", "attention.pattern", "batching.method", "run.backend"):
        if deck.get(key):
            parts.append(f"{key.split('.')[1]} {deck[key]}")
    if a.run.first_trace.last.git_hash:
        parts.append(f"build {a.run.first_trace.last.git_hash[:12]}")
    return " \u00b7 ".join(parts)


def run_section(a, folder, prefix, several):
    """Figures, tables and deck of one run; PNG and CSV files go to `folder` under names that begin
    with `prefix`."""
    out = []
    anchor = escape(prefix)
    if several:
        out.append(
            f'<h2 id="{anchor}run">{escape(a.run.name)}</h2><p'
            f' class="formula">{escape(description(a))}</p>'
        )
    out.append(tiles(a))
    if a.run.notes:
        out.append(
            '<div class="notes"><b>Note</b><ul>'
            + "".join(f"<li>{escape(n)}</li>" for n in a.run.notes)
            + "</ul></div>\n"
        )
    for name, (draw, caption) in FIGURES.items():
        figure = draw(a)
        path = folder / f"{prefix}{name}.png"
        if figure is None:
            path.unlink(missing_ok=True)  # of an earlier report
        else:
            out.append(figure_html(render(figure, path), caption, name))
    out.append(f'<h2 id="{anchor}tables">Tables{escape(": " + a.run.name) if several else ""}</h2>')
    for make in tables.SHOWN + tables.CSV_ONLY:
        table = make(a)
        if table is None:
            continue
        table.write_csv(folder / f"{prefix}{table.name}.csv")
        if make in tables.SHOWN:
            out.append(table_html(table))
    if not a.ring:
        out.append('<p class="formula">No ring: every sequence stays on one rank (cp = 1).</p>')
    if a.run.deck_text:
        out.append(
            "<details><summary>Effective"
            f" deck</summary><pre>{escape(a.run.deck_text)}</pre></details>\n"
        )
    return "".join(out)


def write(analyses, folder):
    """Writes report.html, PNG and CSV files to `folder`; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    several = len(analyses) > 1
    prefixes = [f"{_file_name(a.run.name)}_" if several else "" for a in analyses]
    title = f"{len(analyses)} runs side by side" if several else analyses[0].run.name
    subtitle = (
        " \u00b7 ".join(a.run.name for a in analyses) if several else description(analyses[0])
    )
    links = (
        [("comparison", "Comparison")] * several
        + [(p + "run", a.run.name) for p, a in zip(prefixes, analyses) if several]
        + [("tables", "Tables")] * (not several)
    )
    body = ""
    if several:
        table = tables.comparison(analyses)
        table.write_csv(folder / "comparison.csv")
        body += '<h2 id="comparison">Comparison</h2>' + figure_html(
            render(compare(analyses), folder / "comparison.png"),
            "All runs in one picture.",
            "comparison",
        )
        table.title = ""
        body += table_html(table)
    body += "".join(run_section(a, folder, p, several) for a, p in zip(analyses, prefixes))
    nav = (
        "".join(f'<a href="#{escape(anchor)}">{escape(label)}</a>' for anchor, label in links)
        if several
        else ""
    )
    nav = f"<nav><div>{nav}</div></nav>" if nav else ""
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
        ' content="width=device-width, initial-scale=1"><title>Ballast:'
        f" {escape(title)}</title><style>{CSS}</style></head>\n"
        f"<body><header><div><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></div></header>"
        f"{nav}<main>\n{body}<footer>Written"
        " by ballast-report from the traces of every rank. Figures lie beside this page as PNG,"
        " tables as CSV, all metrics in metrics.json.</footer></main></body></html>\n"
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _file_name(name):
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
