"""One self-contained HTML page: no network; Plotly, style and data inline."""
import functools
import html
import json
from pathlib import Path

import numpy as np

import comparison
import tables
import verdict
from analysis import summary
from figures import FIGURES
from output import write_text
from plot import plain
from style import bytes_unit, seconds_unit, short

HERE = Path(__file__).resolve().parent
MOST_ROWS = 40  # of a table; its CSV file has all


def escape(text):
    return html.escape(str(text), quote=True)


@functools.lru_cache
def plotly():
    """Plotly's script, from the distribution's package or pip's."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", "<\\/script")


class Panels:
    """The page's panels, numbered."""

    def __init__(self):
        self.made = []

    def figure(self, name, panels, caption, run=""):
        """HTML of a figure; its panels are drawn by page.js."""
        body = ""
        for panel in panels:
            key = f"panel-{len(self.made)}"
            self.made.append({**plain(panel), "id": key, "run": run, "figure": name})
            wide = " wide" if len(panels) == 1 or panel["height"] > 400 else ""
            body += (
                f'<div class="panel{wide}"><h4>{escape(panel["title"])}</h4><div id="{key}"'
                f' style="height:{panel["height"]}px"></div>{slider(panel, key)}</div>'
            )
        return (
            f'<figure id="{escape(run)}{escape(name)}"><div class="panels">{body}</div>'
            f"<figcaption>{escape(caption)}</figcaption></figure>\n"
        )


def slider(panel, key):
    steps = panel.get("by_step", ())
    if len(steps) < 2:
        return f'<div class="slider"><output>{escape(steps[0][0])}</output></div>' if steps else ""
    return (
        f'<div class="slider"><input type="range" min="0" max="{len(steps) - 1}" value="0"'
        f' data-panel="{key}" aria-label="step"><output>{escape(steps[0][0])}</output></div>'
    )


def cell(value, spec):
    if isinstance(value, float) and np.isnan(value):
        return "&ndash;"
    return escape(format(value, spec) if spec and not isinstance(value, str) else value)


def shortened(table):
    """(place, row) of the rows that the page shows, and how many it leaves out: totals stay."""
    rows = list(enumerate(table.rows))
    if len(rows) <= MOST_ROWS:
        return rows, 0
    totals = [(r, row) for r, row in rows if str(row[0]).startswith("all")]
    kept = [item for item in rows if item not in totals][: MOST_ROWS - len(totals)]
    return kept + totals, len(rows) - len(kept) - len(totals)


def table_html(table, prefix=""):
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
    shown, left_out = shortened(table)
    for r, row in shown:
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
    if left_out:
        file = escape(f"{prefix}{table.name}.csv")
        formula = f'<p class="formula">{left_out} more rows: {file}</p>' + formula
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
    shown.append(
        (f"{short(s['step_time_s'] * factor, 4)} {unit}", f"step time, mean of {s['steps']}")
    )
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
        shown.append((f"{short(s['peak_bytes'] * factor)} {unit}", "peak memory of a rank"))
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


def rank_groups(a):
    """[(label, ranks)] that the page can be narrowed to: by mesh coordinate, host and speed."""
    groups, mesh = [], a.run.first_trace.last.mesh
    for key in sorted((k for k, degree in mesh.items() if degree > 1), key=_place_in_order):
        values = {}
        for rank in a.ranks:
            values.setdefault(a.run.traces[rank].last.at.get(key, 0), []).append(rank)
        groups += [(f"{key} {value}", ranks) for value, ranks in sorted(values.items())]
    hosts = {}
    for rank in a.ranks:
        hosts.setdefault(a.run.traces[rank].last.host, []).append(rank)
    if len(hosts) > 1:
        groups += [(f"host {host}", ranks) for host, ranks in sorted(hosts.items())]
    if len(a.ranks) > 16:
        order = np.argsort(np.nansum(a.useful, axis=1), kind="stable")
        ranked = [a.ranks[r] for r in order]
        groups = [("16 busiest", ranked[-16:]), ("16 idlest", ranked[:16])] + groups
    return groups


def _place_in_order(key):
    return _mesh_order((key, 0))


def rank_choice(a, prefix, several):
    """The control that narrows a run's figures to a group of ranks."""
    groups = rank_groups(a)
    if len(a.ranks) < 2 or not groups:
        return "", groups
    options = "".join(
        f'<option value="{i}">{escape(label)}</option>' for i, (label, _) in enumerate(groups)
    )
    label = f"ranks of {a.run.name}" if several else "ranks"
    return (
        (
            f'<label>{escape(label)} <select data-run="{escape(prefix)}"><option'
            f' value="-1">all</option>{options}</select></label>'
        ),
        groups,
    )


def run_section(a, folder, prefix, several, panels):
    """Verdict, figures, tables and deck of one run; CSV files go to `folder` under names that begin
    with `prefix`."""
    out, anchor = [], _anchor(prefix)
    if several:
        out.append(
            f'<h2 id="{escape(anchor)}run">{escape(a.run.name)}</h2><p'
            f' class="formula">{escape(description(a))}</p>'
        )
    out.append(verdict.html(a.verdict, escape))
    out.append(tiles(a))
    if a.run.notes:
        out.append(
            '<div class="notes"><b>Note</b><ul>'
            + "".join(f"<li>{escape(n)}</li>" for n in a.run.notes)
            + "</ul></div>\n"
        )
    for name, (draw, caption) in FIGURES.items():
        made = draw(a)
        if made is not None:
            out.append(panels.figure(name, made, caption, anchor))
    of_run = f": {a.run.name}" if several else ""
    out.append(f'<h2 id="{escape(anchor)}tables">Tables{escape(of_run)}</h2>')
    if several:
        out.append(f'<p class="formula">Names of its CSV files begin with {escape(prefix)}.</p>')
    for make in tables.SHOWN + tables.CSV_ONLY:
        table = make(a)
        if table is None:
            continue
        table.write_csv(folder / f"{prefix}{table.name}.csv")
        if make in tables.SHOWN:
            out.append(table_html(table, prefix))
    if not a.ring:
        mesh = a.run.first_trace.last.mesh
        alone = mesh.get("cp_outer", 1) * mesh.get("cp_inner", 1) == 1
        why = "every sequence stays on one rank (cp = 1)" if alone else "no ring step was recorded"
        out.append(f'<p class="formula">No table of ring attention: {why}.</p>')
    if a.run.deck_text:
        out.append(
            "<details><summary>Effective"
            f" deck</summary><pre>{escape(a.run.deck_text)}</pre></details>\n"
        )
    return "".join(out)


def compared(analyses, folder, panels):
    """The section that lays several runs side by side."""
    body = '<h2 id="comparison">Comparison</h2>'
    for name, draw, caption in comparison.FIGURES:
        made = draw(analyses)
        if made:
            body += panels.figure(name, made, caption)
    for table in (comparison.metrics_table(analyses), comparison.steps_table(analyses)):
        table.write_csv(folder / f"{table.name}.csv")
        body += table_html(table)
    return body


def document(title, subtitle, nav, body, panels=None, groups=None):
    """The whole page; with panels also the script that draws them."""
    script = ""
    if panels:
        data = [("panels", panels.made), ("rank-groups", groups or {})]
        script = "".join(
            f'<script type="application/json" id="{key}">'
            # No "<" at all: not only "</script" but "<!--<script" too changes how a page is read.
            + json.dumps(plain(value), separators=(",", ":"), allow_nan=False).replace(
                "<", "\\u003c"
            )
            + "</script>\n"
            for key, value in data
        )
        script += (
            f"<script>{plotly()}</script>\n<script>{(HERE / 'page.js').read_text()}</script>\n"
        )
    nav = f"<nav><div>{nav}</div></nav>" if nav else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
        ' content="width=device-width, initial-scale=1"><title>Ballast:'
        f' {escape(title)}</title><style>{(HERE / "page.css").read_text()}</style></head>\n'
        f"<body><header><div><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></div></header>"
        f"{nav}<main>\n{body}</main>\n{script}</body></html>\n"
    )


def _anchor(prefix):
    """What ids of a run's parts of the page begin with."""
    return prefix or "run_"


def write(analyses, folder, prefixes):
    """Writes report.html and CSV files to `folder`, those of each run under names that begin with
    its prefix (names.py); returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    several = len(analyses) > 1
    title = f"{len(analyses)} runs side by side" if several else analyses[0].run.name
    subtitle = (
        " \u00b7 ".join(a.run.name for a in analyses) if several else description(analyses[0])
    )
    panels, groups = Panels(), {}
    links = [("comparison", "Comparison")] * several
    links += [(p + "run", a.run.name) for p, a in zip(prefixes, analyses) if several]
    links += [(f"{_anchor(prefixes[0])}tables", "Tables")] * (not several)
    nav = "".join(f'<a href="#{escape(anchor)}">{escape(label)}</a>' for anchor, label in links)
    body = compared(analyses, folder, panels) if several else ""
    for a, prefix in zip(analyses, prefixes):
        choice, groups[_anchor(prefix)] = rank_choice(a, _anchor(prefix), several)
        nav += choice
        body += run_section(a, folder, prefix, several, panels)
    body += (
        "<footer>Written by ballast-report from the traces of every rank. Steps count from 1, as in"
        " the log. Tables lie beside this page as CSV, all metrics in metrics.json. Figures zoom by"
        " dragging, double-click shows all again; the camera saves one as PNG.</footer>"
    )
    path = folder / "report.html"
    write_text(path, document(title, subtitle, nav, body, panels, groups))
    return path
