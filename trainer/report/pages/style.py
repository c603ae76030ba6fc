"""The look of the report page; colors are Okabe and Ito's, which people with color blindness tell apart."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --card: #f6f7f8; --ink: #1c2126; --dim: #5d6873; --rule: #dfe3e7;
  --c0: #0072b2; --c1: #e69f00; --c2: #009e73; --c3: #d55e00; --c4: #cc79a7; --c5: #56b4e9; --c6: #8a7f00; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181c; --card: #1d2329; --ink: #e6eaee; --dim: #9aa5b1;
  --rule: #38424c; --c0: #4aa8e0; --c1: #f0b429; --c2: #2fc298; --c3: #ff7f3f; --c4: #e39bc4; --c6: #d9cc3c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1500px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 28px 0 8px; }
.failure pre { background: var(--card); border-left: 4px solid var(--c3); border-radius: 4px; margin: 0;
  padding: 10px 12px; white-space: pre-wrap; overflow-wrap: anywhere; }
header p, .hint, footer { color: var(--dim); margin: 4px 0 12px; } footer { margin-top: 28px; overflow-wrap: anywhere; }
.tiles { display: flex; flex-wrap: wrap; gap: 8px; margin: 16px 0; }
.tiles div { flex: 1 1 104px; max-width: 240px; background: var(--card); border-radius: 8px; padding: 8px 10px; }
dt { color: var(--dim); font-size: .8rem; } dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.tiles dt, .tiles dd { white-space: nowrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 12px; }
figure { margin: 0; background: var(--card); border-radius: 8px; padding: 10px 8px 6px; display: flex;
  flex-direction: column; } figure svg { width: 100%; height: auto; display: block; margin-top: auto; }
figcaption { font-weight: 600; padding: 0 4px; }
.keys { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 12px; margin: 2px 4px; padding: 0; font-size: .8rem;
  color: var(--dim); }
.keys i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; }
svg text { fill: var(--dim); font-size: 11px; } svg .end { text-anchor: end; } svg .mid { text-anchor: middle; }
svg .rule { stroke: var(--rule); stroke-width: 1; } svg .resume { stroke: var(--dim); stroke-dasharray: 3 3; }
svg .save { fill: var(--dim); } svg .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
svg .faint { opacity: .35; } svg .area { stroke: var(--card); stroke-width: .5; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
thead th { color: var(--dim); font-weight: 500; font-size: .85rem; } .bars { width: 100%; max-width: 640px; }
.bars th { font-weight: 400; } .scroll tr > :first-child { position: sticky; left: 0; background: var(--paper); }
.bars .wide { width: 100%; } .bar { background: var(--c0); height: 12px; border-radius: 3px;
  min-width: 1px; } .notes { padding-left: 20px; } .notes li { overflow-wrap: anywhere; margin: 3px 0; }
"""
