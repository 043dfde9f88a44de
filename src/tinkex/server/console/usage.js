// Tokens by day, model, owner and key, and what is stored.

import { api, Badge, bytes, count, Empty, html, Loading, Problem, short, Text, useClock, useLoaded, useState } from './core.js';

const KINDS = { training: ['trained', 'a'], sampled: ['sampled', 'b'], prefill: ['prompts', 'c'], cached: ['prompts from the cache', 'd'] };
const kindOf = (what) => KINDS[what] ?? [what, 'd'];

const sumBy = (rows, key) => {
  const sums = new Map();
  for (const row of rows) {
    const name = key(row);
    sums.set(name, (sums.get(name) ?? 0) + row.tokens);
  }
  return sums;
};

function Days({ rows, days }) {
  const dates = Array.from({ length: days }, (_, index) => new Date(Date.now() - (days - 1 - index) * 86400000).toISOString().slice(0, 10));
  const sums = sumBy(rows, (row) => `${row.day} ${row.what}`);
  const kinds = [...new Set(rows.map((row) => row.what))].sort();
  const totals = dates.map((day) => kinds.reduce((sum, what) => sum + (sums.get(`${day} ${what}`) ?? 0), 0));
  const top = Math.max(...totals, 1);
  return html`<section class="card"><h2>Tokens by day</h2>
    <div class="days" role="img" aria-label=${`Tokens of the last ${days} days; ${count(totals.at(-1))} today`}>
      ${dates.map((day, index) => html`<div key=${day} class="day" title=${`${day}: ${count(totals[index])} tokens`}>
        ${kinds.map((what) => html`<span key=${what} class="bar-part ${kindOf(what)[1]}" style=${{ height: `${(100 * (sums.get(`${day} ${what}`) ?? 0)) / top}%` }}></span>`)}
      </div>`)}
    </div>
    <p class="day-labels muted small"><span>${dates[0]}</span><span>today</span></p>
    <ul class="legend">${kinds.map((what) => html`<li key=${what}><span class="swatch bar-part ${kindOf(what)[1]}"></span>${kindOf(what)[0]}<span class="value">${short(rows.filter((row) => row.what === what).reduce((sum, row) => sum + row.tokens, 0))}</span></li>`)}</ul>
  </section>`;
}

/** What the keys of an owner used, or for administrators all keys. A server without keys has none. */
function Keys({ rows, showsOwner }) {
  return html`<section class="card"><h2>By key</h2>
    <div class="table-wrap" tabindex="0"><table><thead><tr><th>Key</th>${showsOwner && html`<th>Owner</th>`}<th>Base model</th>${Object.entries(KINDS).map(([what, [label]]) => html`<th key=${what} class="num">${label}</th>`)}</tr></thead>
    <tbody>${rows.map((one) => html`<tr key=${`${one.owner} ${one.key_id} ${one.base_model}`}>
      <td>${one.key_id
        ? html`<${Text} max=${60}>${one.name || one.owner}</${Text}> <code>${one.hint}…</code>${one.state !== 'active' && html` <${Badge} kind=${one.state === 'revoked' ? 'failed' : 'idle'}>${one.state}</${Badge}>`}`
        : html`<span class="muted" title="Usage from before the server had keys, or stored them with usage">no key: earlier usage</span>`}</td>
      ${showsOwner && html`<td><${Text} max=${60}>${one.owner}</${Text}></td>`}<td><${Text} max=${80}>${one.base_model}</${Text}></td>
      ${Object.keys(KINDS).map((what) => html`<td key=${what} class="num">${count(one[what])}</td>`)}</tr>`)}</tbody></table></div></section>`;
}

export function Usage({ session }) {
  const [days, setDays] = useState(30);
  const tick = useClock(60000);
  const { data, error } = useLoaded((signal) => api(`api/v1/console/usage?days=${days}`, { signal }), [days, tick]);
  const storage = useLoaded((signal) => api('api/v1/billing/usage/checkpoints/current', { signal }), [tick]);
  const keys = useLoaded((signal) => api(`api/v1/billing/usage/keys?days=${days}`, { signal }), [days, tick]);
  const rows = data?.usage ?? [];
  const groups = new Map();
  for (const row of rows) {
    const name = JSON.stringify([row.owner, row.base_model]);
    const group = groups.get(name) ?? { owner: row.owner, model: row.base_model, sums: {} };
    group.sums[row.what] = (group.sums[row.what] ?? 0) + row.tokens;
    groups.set(name, group);
  }
  return html`<header class="page-head"><h1>Usage</h1><span class="grow"></span>
      <label>Last <select value=${days} onChange=${(event) => setDays(Number(event.target.value))}><option value="7">7 days</option><option value="30">30 days</option><option value="90">90 days</option></select></label></header>
    <${Problem} error=${error} />
    ${!data && !error && html`<${Loading} />`}
    ${data && !data.is_complete && html`<p class="problem" role="alert">This is too much for one answer: the oldest days are missing. Choose fewer days.</p>`}
    ${data && !rows.length && html`<${Empty} title="No tokens in this time" />`}
    ${rows.length > 0 && html`<${Days} rows=${rows} days=${days} />
      <section class="card"><h2>By ${session.is_admin ? 'owner and model' : 'model'}</h2>
        <div class="table-wrap" tabindex="0"><table><thead><tr><th>Owner</th><th>Base model</th>${Object.entries(KINDS).map(([what, [label]]) => html`<th key=${what} class="num">${label}</th>`)}</tr></thead>
        <tbody>${[...groups.values()].map((one) => html`<tr key=${`${one.owner} ${one.model}`}><td><${Text} max=${60}>${one.owner}</${Text}></td><td><${Text} max=${80}>${one.model}</${Text}></td>
          ${Object.keys(KINDS).map((what) => html`<td key=${what} class="num">${count(one.sums[what])}</td>`)}</tr>`)}</tbody></table></div></section>`}
    ${keys.error && html`<${Problem} error=${keys.error} />`}
    ${keys.data?.data.length > 0 && html`<${Keys} rows=${keys.data.data} showsOwner=${session.is_admin} />`}
    ${storage.data && html`<section class="card"><h2>Stored checkpoints</h2>
      ${storage.data.data.length ? html`<div class="table-wrap" tabindex="0"><table><thead><tr><th>Project</th><th class="num">Checkpoints</th><th class="num">Size</th></tr></thead>
      <tbody>${storage.data.data.map((one) => html`<tr key=${one.project_id ?? ''}><td><${Text} max=${80}>${one.project_id ?? 'none'}</${Text}></td><td class="num">${count(one.checkpoint_count)}</td><td class="num">${bytes(one.size_bytes)}</td></tr>`)}</tbody></table></div>` : html`<p class="muted">None.</p>`}</section>`}`;
}
