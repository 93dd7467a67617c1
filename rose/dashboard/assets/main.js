// The page: it shows what the feed holds, again after each look and once a second, for ages go on without one.
import { html, render, useEffect, useState } from "/assets/htm-preact.js";
import { Chart } from "/assets/chart.js";
import { ageS, badge, feed, listen, nowS } from "/assets/feed.js";
import { Lending, Run, Services, Tiles } from "/assets/panels.js";
import { clock, seconds } from "/assets/words.js";

const SPANS = [["5 min", 300], ["30 min", 1800], ["all", Infinity]];
const dark = matchMedia("(prefers-color-scheme: dark)");

const Idle = () => html`<section class="idle"><h2>Nothing runs here</h2>
  <p>This page shows every service of yours on this machine as soon as it starts. In another terminal:</p>
  <ul><li><code>rose demo</code> trains a small model beside a serving engine, in eight minutes or so</li>
  <li><code>rose run JOB.toml</code> runs a job of your own</li></ul></section>`;

function Head({ span, choose }) {
  const now = badge();
  const says = { live: `live, ${clock(nowS(), true)}`, reconnecting: "reconnecting", connecting: "connecting",
    stale: `stale: nothing heard for ${seconds(ageS())}` }[now];
  return html`<header><h1>ROSE</h1><span id="badge" class=${"badge " + now} role="status" aria-live="off">${says}</span>
    <div class="spans" role="group" aria-label="Time shown">${SPANS.map(([label, length]) => html`
      <button type="button" key=${label} aria-pressed=${span === length} onClick=${() => choose(length)}>${label}</button>`)}</div></header>`;
}

function Shown({ state, span }) {
  const end = feed.atS, begin = Math.max(end - span, Math.min(feed.times[0] ?? end, end - 60));
  return html`<${Tiles} tiles=${state.tiles} /><${Lending} lending=${state.lending} />
    ${state.charts.length > 0 && html`<section class="charts" aria-label="Over time">${state.charts.map((chart) => html`
      <${Chart} key=${chart.chart_id} chart=${chart} span=${[begin, end]} scheme=${dark.matches} />`)}</section>`}
    ${state.runs.length > 0 && html`<section><h2>Runs</h2>${state.runs.map((run) => html`<${Run} key=${run.id} run=${run} />`)}</section>`}
    <${Services} services=${state.services} />`;
}

function App() {
  const [, again] = useState(0), [span, choose] = useState(300);
  useEffect(() => {
    const redraw = () => again((times) => times + 1);
    listen(redraw);
    setInterval(redraw, 1000);
    dark.addEventListener("change", redraw);
  }, []);
  return html`<${Head} span=${span} choose=${choose} />
    <main class=${badge()}>${feed.state && (feed.state.idle ? html`<${Idle} />` : html`<${Shown} state=${feed.state} span=${span} />`)}</main>`;
}

render(html`<${App} />`, document.getElementById("app"));
