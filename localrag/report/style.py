"""The look of the page. Colours of sections keep 4.5 to 1 with white letters, and 3 to 1 with the page by day and by night."""

from __future__ import annotations

COLOURS = {
    "scaffold": "#6b7280",
    "system": "#8b5cd6",
    "tools": "#c2570c",
    "memories": "#c43b7a",
    "summary": "#0f7f78",
    "history": "#3b6fd4",
    "evidence": "#25803f",
    "attachments": "#8a6a12",
    "question": "#0b7aa6",
    "answer": "#c2362f",
}
OTHER_COLOUR = "#7a6a58"
SPARE_COLOUR = "var(--spare)"

STYLE = """
@property --page { syntax: "<length>"; inherits: true; initial-value: 0px; }
@property --k { syntax: "<number>"; inherits: true; initial-value: 1; }
:root {
  color-scheme: light dark;
  --paper: #f6f6f3; --card: #ffffff; --ink: #1b1e24; --soft: #5c6370; --line: #dcdcd6; --spare: #e9e9e4; --mark: #25803f;
}
@media (prefers-color-scheme: dark) {
  :root { --paper: #0f1216; --card: #15181d; --ink: #e7e9ee; --soft: #9aa3b2; --line: #2b3038; --spare: #23272e; --mark: #5cc27c; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1.02rem; line-height: 1.4; margin: 0 0 .15rem; font-weight: 600; overflow-wrap: anywhere; }
p { margin: .25rem 0; }
.soft, caption, figcaption { color: var(--soft); font-size: .86rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0 0; padding: 0; }
.tiles div, article, .scroll { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tiles div { padding: .7rem .9rem; }
.tiles dt { color: var(--soft); font-size: .82rem; }
.tiles dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
article { padding: 1.1rem 1.25rem 1.25rem; margin: 0 0 1.25rem; }
article .scroll { border: 0; border-radius: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: left; padding: .5rem .75rem 0; }
th, td { padding: .38rem .75rem; text-align: left; vertical-align: top; border-top: 1px solid var(--line); }
thead th { border-top: 0; color: var(--soft); font-weight: 500; font-size: .82rem; white-space: nowrap; }
tbody th { font-weight: 500; white-space: nowrap; }
article th:first-child, article td:first-child { padding-left: 0; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide { min-width: 12rem; overflow-wrap: anywhere; }
.part { padding-left: 1.35rem !important; color: var(--soft); }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 3px; margin-right: .5em; vertical-align: -.05em; }
.spare { border: 1px dashed var(--soft); }
figure { margin: .9rem 0 .4rem; }
figcaption { margin: .55rem 0 .25rem; }
.frame { container-type: inline-size; overflow-x: auto; overflow-y: hidden; border-radius: 6px; background: var(--spare); }
@supports (transform: scaleX(tan(atan2(1cqi, 1px)))) { .frame { overflow: clip; } }
.window {
  --page: 100cqi; --k: tan(atan2(var(--page), var(--width)));
  display: flex; width: var(--width); transform: scaleX(var(--k)); transform-origin: 0 0;
}
.given { height: 2.6rem; }
.used { height: 1.3rem; }
.window > div { position: relative; overflow: hidden; color: #fff; box-shadow: inset calc(-1px / var(--k)) 0 var(--card); }
.window > div > i { position: absolute; inset: 0 auto 0 0; background: var(--c); }
.given > div { background: var(--c); }
.used > div { background: color-mix(in srgb, var(--c) 30%, var(--card)); }
.window span {
  position: absolute; left: 0; width: calc(100% * var(--k)); transform: scaleX(calc(1 / var(--k))); transform-origin: 0 0;
  padding: 0 .45rem; line-height: 1.1; font-size: .8rem; white-space: nowrap; overflow: hidden; text-overflow: ellipsis;
}
.window b { display: block; font-weight: 600; margin-top: .42rem; overflow: hidden; text-overflow: ellipsis; }
.axis { display: flex; justify-content: space-between; color: var(--soft); font-size: .75rem; font-variant-numeric: tabular-nums; }
.trend { display: inline-flex; align-items: flex-end; gap: 1px; height: 1.3rem; vertical-align: bottom; }
.trend i { width: 4px; background: var(--mark); border-radius: 1px 1px 0 0; min-height: 1px; }
.yes { color: var(--mark); font-weight: 600; }
details { margin-top: .6rem; }
td details { margin: 0; }
summary { cursor: pointer; color: var(--soft); font-size: .88rem; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; max-width: 46rem; }
@media (max-width: 40rem) {
  main { padding: 1.25rem .75rem 3rem; }
  article { padding: .9rem .8rem 1rem; }
  th, td { padding: .35rem .5rem; }
  .tiles { grid-template-columns: repeat(2, 1fr); }
  .window span.small { display: none; }
  .wide { min-width: 7rem; }
}
@media print { body { background: none; } article { break-inside: avoid; } }
"""
