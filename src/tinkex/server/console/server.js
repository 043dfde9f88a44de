// The state of the server, live: engines, their memory, the cache of prompts, and the queue.

import { Badge, bytes, count, html, live, Loading, short, useEffect, useState } from './core.js';
import { COLORS, TimeChart } from './chart.js';

const KEPT = 450; // 15 minutes of events every 2 s
const RATES = [['tokens_trained', 'trained'], ['tokens_sampled', 'sampled'], ['tokens_prefilled', 'prompts']];

/** Tokens per second between two states of an engine. */
function ratesOf(before, now) {
  const seconds = (new Date(now.time) - new Date(before.time)) / 1000;
  return Object.fromEntries(now.engines.map((engine) => {
    const old = before.engines.find((one) => one.engine === engine.engine)?.stats;
    const rate = (name) => (engine.stats && old ? Math.max(0, (engine.stats[name] - old[name]) / seconds) : 0);
    return [engine.engine, Object.fromEntries(RATES.map(([name]) => [name, rate(name)]))];
  }));
}

function Bar({ label, parts, total, format = bytes }) {
  const shown = parts.filter((part) => part.value > 0);
  return html`<div class="bar-block"><div class="bar" role="img" aria-label=${`${label}: ${shown.map((part) => `${part.name} ${format(part.value)}`).join(', ')} of ${format(total)}`}>
      ${shown.map((part) => html`<span key=${part.name} class="bar-part ${part.kind}" style=${{ width: `${(100 * part.value) / Math.max(total, 1)}%` }} title=${`${part.name}: ${format(part.value)}`}></span>`)}
    </div>
    <ul class="legend">${shown.map((part) => html`<li key=${part.name}><span class="swatch bar-part ${part.kind}"></span>${part.name}<span class="value">${format(part.value)}</span></li>`)}
      <li class="muted">of ${format(total)}</li></ul></div>`;
}

function Engine({ engine, history }) {
  const { stats } = engine;
  const [kind, words] = stats ? ['running', 'up'] : engine.waiting_for ? ['waiting', 'not up'] : ['idle', 'not loaded'];
  const points = history.map((one) => ({ time: one.time, step: 0, metrics: one.rates[engine.engine] ?? {} }));
  const series = RATES.map(([name, label], index) => ({
    id: name, label, color: COLORS[index],
    points: points.map((point) => ({ ...point, metrics: { rate: point.metrics[name] ?? 0 } })),
  }));
  const latest = history.at(-1)?.rates[engine.engine] ?? {};
  const activations = stats ? stats.batch_tokens * stats.activation_bytes_per_token : 0;
  return html`<section class="card engine"><header class="page-head"><h2>${engine.engine}</h2>
      <${Badge} kind=${kind}>${words}</${Badge}>
      <span class="grow"></span><span class="muted">${engine.device ?? ''} ${engine.dtype ?? ''}</span></header>
    ${engine.waiting_for && html`<p class="note">${engine.waiting_for}</p>`}
    ${!stats && !engine.waiting_for && html`<p class="muted">It starts with the next request.</p>`}
    ${stats && html`
      <dl class="facts">
        <div><dt>Training</dt><dd>${count(stats.models_training)} ${stats.models_training === 1 ? 'model' : 'models'}, ${stats.training_waiting} waiting</dd></div>
        <div><dt>Sampling</dt><dd>${count(stats.sequences_running)} ${stats.sequences_running === 1 ? 'sequence' : 'sequences'}, ${stats.samples_waiting} waiting</dd></div>
        ${RATES.map(([name, label]) => html`<div key=${name}><dt>${label}/s</dt><dd>${short(latest[name] ?? 0)} <span class="muted">(${short(stats[name])} in all)</span></dd></div>`)}
      </dl>
      ${history.length > 1 && html`<h3>Tokens per second</h3><${TimeChart} series=${series} metric="rate" label="Tokens per second over the last minutes" />
        <ul class="legend">${series.map((one) => html`<li key=${one.id}><span class="swatch" style=${{ background: one.color }}></span>${one.label}</li>`)}</ul>`}
      <h3>Memory plan</h3>
      <${Bar} label="Memory" total=${stats.memory_bytes} parts=${[
        { name: 'base model', value: stats.base_bytes, kind: 'a' },
        { name: 'adapters', value: stats.adapter_budget_bytes, kind: 'b' },
        { name: 'KV cache', value: stats.kv_bytes, kind: 'c' },
        { name: 'activations', value: activations, kind: 'd' },
      ]} />
      <h3>Adapters</h3>
      <${Bar} label="Adapters" total=${stats.adapter_budget_bytes} parts=${[
        { name: `${stats.adapters_resident} in training`, value: stats.adapters_resident_bytes, kind: 'b' },
        { name: `${stats.sampler_adapters} for samples`, value: stats.sampler_adapters_bytes, kind: 'c' },
      ]} />
      <p class="muted small">${stats.adapters_on_host} in host memory (${bytes(stats.adapters_on_host_bytes)}), ${stats.adapters_on_disk} on disk (${bytes(stats.adapters_on_disk_bytes)})</p>
      <h3>Cache pages</h3>
      ${!stats.kv_pages && html`<p class="muted small">None yet; the first sample makes them.</p>`}
      ${stats.kv_pages > 0 && html`<${Bar} label="Cache pages" total=${stats.kv_pages} format=${count} parts=${[
        { name: 'in use', value: stats.kv_pages_used, kind: 'a' },
        { name: 'kept prefixes', value: stats.kv_pages_known, kind: 'c' },
      ]} />`}`}
  </section>`;
}

export function Server({ session }) {
  const [state, setState] = useState(null);
  const [history, setHistory] = useState([]);
  useEffect(() => {
    let before = null;
    return live(() => 'server=true', {
      server: (now) => {
        setState(now);
        const old = before;
        before = now;
        if (old) setHistory((kept) => [...kept.slice(1 - KEPT), { time: now.time, rates: ratesOf(old, now) }]);
      },
    });
  }, []);
  if (!state) return html`<${Loading} />`;
  return html`<header class="page-head"><h1>Server</h1>
      ${state.problem ? html`<${Badge} kind="failed">not ready</${Badge}>` : html`<${Badge} kind="running">ready</${Badge}>`}
      <span class="grow"></span><span class="muted">tinkex ${state.version}</span></header>
    ${state.problem && html`<p class="problem" role="alert">${state.problem}</p>`}
    <dl class="facts">
      <div><dt>Open requests</dt><dd>${count(state.requests_open)}</dd></div>
      <div><dt>Waiting</dt><dd>${count(state.requests_waiting)}</dd></div>
      <div><dt>Active owners</dt><dd>${count(state.owners_active)}</dd></div>
    </dl>
    ${state.engines.map((engine) => html`<${Engine} key=${engine.engine} engine=${engine} history=${history} />`)}
    <section class="card"><h2>Queue by owner</h2>
      ${!session.is_admin && html`<p class="muted small">You see your own work; an administrator sees that of all owners.</p>`}
      ${state.owners.length ? html`<div class="table-wrap" tabindex="0"><table><thead><tr><th>Owner</th><th class="num">Requests</th><th class="num">Tokens</th><th class="num">Sequences</th></tr></thead>
        <tbody>${state.owners.map((one) => html`<tr key=${one.owner}><td><bdi>${one.owner}</bdi></td><td class="num">${count(one.requests)}</td><td class="num">${count(one.tokens)}</td><td class="num">${count(one.samples)}</td></tr>`)}</tbody></table></div>`
        : html`<p class="muted">Nothing waits.</p>`}</section>`;
}
