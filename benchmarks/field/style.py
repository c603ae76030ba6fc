"""The look of the page, beside that of a run's report."""

FIELD_STYLE = """
:root { --good: #00795a; --bad: #b54400; } @media (prefers-color-scheme: dark) { :root { --good: #2fc298; --bad:
#ff8f55; } } header p { max-width: 72ch; } main h2 { margin-top: 34px; } h2 small { color: var(--dim); font-weight:
400; font-size: .85rem; display: block; } svg .name, svg .label { fill: var(--ink); font-size: 11.5px; } svg
.name.ours, svg .value.ours { fill: var(--c0); font-weight: 700; } svg .name.limit, svg .value.limit { fill:
var(--dim); } svg .value { fill: var(--ink); font-size: 11.5px; font-variant-numeric: tabular-nums; } svg .dim {
fill: var(--dim); } svg .label { paint-order: stroke; stroke: var(--card); stroke-width: 4px; } svg rect.bar {
min-width: 0; background: none; } svg rect.ours { fill: var(--c0); } svg rect.peer { fill: var(--dim); opacity: .55;
} svg rect.limit { fill: none; stroke: var(--dim); stroke-dasharray: 3 2; } svg .whisker { stroke: var(--ink);
stroke-width: 1.6; } svg .steady { fill: var(--card); stroke: var(--ink); stroke-width: 1.6; } svg .even { stroke:
var(--dim); stroke-width: 1.4; } svg .track { stroke: var(--rule); } svg .spread { stroke-width: 5; opacity: .4;
stroke-linecap: round; } svg .spread.good { stroke: var(--good); } svg .spread.bad { stroke: var(--bad); } svg
.dot.good { fill: var(--good); } svg .dot.bad { fill: var(--bad); } svg .value.good { fill: var(--good);
font-weight: 600; } svg .value.bad { fill: var(--bad); font-weight: 600; } .key svg { width: 34px; height: 14px;
vertical-align: -2px; margin-right: 4px; } .charts { align-items: start; } .ratios { max-width: 480px; } figure svg
{ margin-top: 4px; } .scroll table { font-size: .86rem; } td.num, th.num { text-align: right; } tr.ours td, tr.ours
th { font-weight: 600; color: var(--c0); } tbody th { font-weight: 400; } blockquote { margin: 4px 0 4px;
padding-left: 10px; border-left: 3px solid var(--rule); } dl.peers dt { color: var(--ink); font-size: 1rem;
font-weight: 600; margin-top: 14px; } dl.peers dd { font-size: .92rem; margin: 0; max-width: 80ch; } a { color:
var(--c0); overflow-wrap: anywhere; } .keys { gap: 4px 16px; } .key { padding-left: 38px; text-indent: -38px; }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--dim); } svg .title { fill: var(--ink); font-size:
13px; font-weight: 700; } th.group { border-left: 1px solid var(--rule); padding-left: 8px; } th.group:first-child {
border-left: 0; } code { font-size: .88em; overflow-wrap:
anywhere; }
"""
