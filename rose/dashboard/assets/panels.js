// Runs and services, as the server tells of them. Every text goes through the template and is escaped by it.
import { html, useState } from "/assets/htm-preact.js";
import { nowS } from "/assets/feed.js";
import { count, figure, seconds } from "/assets/words.js";

const FEW = 8;
const ACCOUNT_COLOURS = {
  trained: "green", evaluation: "sky", "in-flight": "blue", "zero-variance": "grey", stale: "yellow",
  truncated: "orange", "environment-failed": "purple", aborted: "vermilion", unreceived: "black",
};

const Life = ({ life }) => html`<span class=${"life " + life}>${life}</span>`;

export const Tiles = ({ tiles }) => html`<dl class="tiles">${tiles.map((tile) => html`
  <div class=${"tile " + tile.tone} key=${tile.label}><dt>${tile.label}</dt><dd class="value">${tile.value}</dd><dd class="says">${tile.says}</dd></div>`)}</dl>`;

export const Lending = ({ lending }) => html`<div class="lending">${lending.map((one) => html`
  <p class=${one.lent ? "lent" : "shut"} key=${one.executor}>${one.name && lending.length > 1 ? html`<strong>${one.name}</strong> ` : ""}${one.sentence}</p>`)}</div>`;

function Ledger({ run }) {
  const held = run.accounts.filter(([, tokens]) => tokens > 0);
  const all = held.reduce((sum, [, tokens]) => sum + tokens, 0);
  if (run.generated == null) return null;
  return html`<div class="ledger-box"><h4>Token ledger</h4>
    <div class="ledger" aria-hidden="true">${held.map(([account, tokens]) => html`
      <span key=${account} class=${"fill " + (ACCOUNT_COLOURS[account] || "grey")} style=${{ width: (100 * tokens) / all + "%" }}></span>`)}</div>
    <table class="accounts"><tbody>
      ${held.map(([account, tokens]) => html`<tr key=${account}><th scope="row"><span class=${"swatch fill " + (ACCOUNT_COLOURS[account] || "grey")}></span>${account}</th><td>${count(tokens)}</td><td>${figure("%", tokens / all)}</td></tr>`)}
    </tbody><tfoot>
      <tr><th scope="row">generated</th><td>${count(run.generated)}</td><td></td></tr>
      <tr><th scope="row">in no account</th><td>${count(run.gap)}</td><td class="quiet">${run.gap === 0 ? "none" : "on their way"}</td></tr>
    </tfoot></table></div>`;
}

const Engines = ({ engines }) => html`<div><h4>Rollout engines</h4><div class="scroll"><table>
  <thead><tr><th scope="col">engine</th><th scope="col">state</th><th scope="col" class="n">version</th><th scope="col" class="n">behind</th><th scope="col" class="n">tokens/s</th></tr></thead>
  <tbody>${engines.map((engine) => html`<tr key=${engine.name}>
    <th scope="row">${engine.name} <span class="quiet">${engine.kind}</span></th><td>${engine.state}</td><td class="n">${engine.version}</td>
    <td class="n">${engine.lag == null ? "–" : engine.lag}</td><td class="n">${count(engine.tokens_s)}</td></tr>`)}</tbody></table></div></div>`;

export function Run({ run }) {
  const success = Object.entries(run.success).map(([purpose, value]) => `${purpose} ${figure("%", value)}`).join(", ");
  return html`<article class="run"><h3>${run.name}<${Life} life=${run.life} /></h3>
    <p class="quiet">step ${run.step} of ${run.steps} <progress max=${run.steps} value=${run.step} aria-label="steps done"></progress> version ${run.version ?? "–"}${success ? ` · success: ${success}` : ""}</p>
    <div class="pair">${run.engines.length > 0 && html`<${Engines} engines=${run.engines} />`}<${Ledger} run=${run} /></div></article>`;
}

function Waits({ waits, at }) {
  if (!waits.length) return html`<p class="quiet">waits for nothing</p>`;
  return html`<div class="scroll"><table><thead><tr><th scope="col">waits for</th><th scope="col">from</th><th scope="col" class="n">for</th><th scope="col" class="n">deadline</th></tr></thead>
    <tbody>${waits.map((wait) => { const left = wait.deadline_s - at; return html`<tr key=${wait.what + wait.whom}>
      <th scope="row">${wait.what}</th><td class="long">${wait.whom}</td><td class="n">${seconds(at - wait.since_s)}</td>
      <td class=${left < 0 ? "n overdue" : "n"}>${left < 0 ? seconds(-left) + " ago" : "in " + seconds(left)}</td></tr>`; })}</tbody></table></div>`;
}

const Parts = ({ parts, at }) => html`<div class="scroll"><table><thead><tr><th scope="col">part</th><th scope="col">state</th><th scope="col" class="n">for</th><th scope="col">detail</th></tr></thead>
  <tbody>${parts.map((part) => html`<tr key=${part.name}><th scope="row">${part.name}</th><td>${part.state}</td><td class="n">${seconds(at - part.since_s)}</td><td class="long">${part.detail}</td></tr>`)}</tbody></table></div>`;

function Service({ service, few }) {
  const [open] = useState(few);
  const heard = service.heard_s ? `last heard of ${seconds(nowS() - service.heard_s)} ago` : "";
  const ended = service.life === "ended";
  const says = [service.problem, ended ? "" : heard, ...service.unanswered].filter(Boolean).join("; ");
  // What is gone waits no longer: it is told as it was when it last spoke.
  const at = ended || service.life === "dead" ? service.heard_s : nowS();
  return html`<details class="service" open=${open}>
    <summary><strong>${service.name}</strong><${Life} life=${service.life} />
      ${ended && html`<span class="quiet">${heard} · </span>`}<span class="quiet">${service.parts ? service.parts.map((part) => `${part.name} ${part.state}`).join(" · ") : ""}</span>
      ${says && html`<span class="trouble">${says}</span>`}</summary>
    ${service.parts && html`<div class="pair"><${Parts} parts=${service.parts} at=${at} /><${Waits} waits=${service.waits} at=${at} /></div>
      <p class="quiet facts">${service.id} · pid ${service.pid} · output ${service.output}${service.facts.map(([key, value]) => ` · ${key} ${value}`).join("")}</p>`}
  </details>`;
}

// What a service can be found by.
const textOf = ({ name, life, problem, unanswered, parts = [], waits = [] }) =>
  [name, life, problem, ...unanswered, ...parts.flatMap((one) => [one.name, one.state, one.detail]),
    ...waits.flatMap((one) => [one.what, one.whom])].join(" ").toLowerCase();

export function Services({ services }) {
  const [wanted, want] = useState("");
  const all = Object.values(services), few = all.length <= FEW;
  const words = wanted.toLowerCase().split(" ").filter(Boolean);
  const shown = all.filter((one) => words.every((word) => textOf(one).includes(word)));
  return html`<section><h2>Services</h2>
    ${!few && html`<label class="filter">Show those with <input type="search" value=${wanted} onInput=${(event) => want(event.target.value)} placeholder="stale, engine, a wait ..." /> <span class="quiet">${shown.length} of ${all.length}</span></label>`}
    ${shown.map((service) => html`<${Service} key=${service.id} service=${service} few=${few} />`)}</section>`;
}
