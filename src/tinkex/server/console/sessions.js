// Sessions and samplers.

import { api, Badge, bytes, count, CopyButton, Empty, html, Loading, Problem, shortId, Text, to, useClock, useEffect, useLoaded, useState, When } from './core.js';
import { Cell, VirtualList } from './list.js';

const PAGE = 100;
const STATUS = { active: 'running', cancelled: 'idle', client_finished: 'finished', failed: 'failed' };
const WORDS = { active: 'active', cancelled: 'silent', client_finished: 'finished', failed: 'failed' };

export function Sessions() {
  const tick = useClock(10000);
  const [state, setState] = useState({ rows: [], cursor: null, done: false, error: null });
  const more = async (old) => {
    try {
      const page = await api('api/v1/sessions/search', { method: 'POST', body: { limit: PAGE, ...(old.cursor ? { cursor: old.cursor } : {}) } });
      setState({ rows: [...old.rows, ...page.sessions], cursor: page.next_cursor, done: !page.next_cursor, error: null });
    } catch (error) {
      setState({ ...old, error });
    }
  };
  /** The newest sessions again, before those that are loaded already. */
  const refresh = async () => {
    const page = await api('api/v1/sessions/search', { method: 'POST', body: { limit: PAGE } }).catch(() => null);
    const fresh = new Set(page?.sessions.map((one) => one.session_id));
    if (page) setState((old) => ({ ...old, rows: [...page.sessions, ...old.rows.filter((one) => !fresh.has(one.session_id))] }));
  };
  useEffect(() => {
    if (!tick) more(state);
    else refresh();
  }, [tick]);
  return html`<header class="page-head"><h1>Sessions</h1></header><${Problem} error=${state.error} />
    <section class="card flush"><div class="table-wrap" tabindex="0"><table>
      <thead><tr><th>Session</th><th>Status</th><th class="wide">Project</th><th class="num">Checkpoints</th><th class="num wide">Storage</th><th>Began</th></tr></thead>
      <tbody>${state.rows.map((one) => html`<tr key=${one.session_id}>
        <td><a href=${to.session(one.session_id)} title=${one.session_id}><${Text} max=${80}>${one.display_name || `${one.session_id.slice(0, 8)}…`}</${Text}></a></td>
        <td><${Badge} kind=${STATUS[one.status.type] ?? 'idle'}>${WORDS[one.status.type] ?? one.status.type}</${Badge}></td>
        <td class="wide muted"><${Text} max=${60}>${one.project_id}</${Text}></td>
        <td class="num">${count(one.checkpoints_count)}</td><td class="num wide">${bytes(one.checkpoint_storage_bytes)}</td>
        <td class="muted"><${When} time=${one.created_at} /></td></tr>`)}</tbody>
    </table></div>
    ${state.done && !state.rows.length && html`<${Empty} title="No sessions yet"><p>Each ServiceClient has one.</p></${Empty}>`}
    ${!state.done && state.cursor && html`<p class="pad"><button onClick=${() => more(state)}>Load more</button></p>`}</section>`;
}

export function Session({ id }) {
  const { data, error } = useLoaded((signal) => api(`api/v1/sessions/${encodeURIComponent(id)}`, { signal }), [id]);
  const found = useLoaded((signal) => api('api/v1/sessions/search', { method: 'POST', body: { session_id: id, limit: 1 }, signal }), [id]);
  const [trace, setTrace] = useState(null);
  if (error) return html`<h1>Session</h1><${Problem} error=${error} />`;
  if (!data) return html`<${Loading} />`;
  const about = found.data?.sessions[0];
  const open = async () => {
    try {
      const { url } = await api(`api/v1/sessions/${encodeURIComponent(id)}/trace_export`);
      location.assign(url);
    } catch (failure) {
      setTrace(failure);
    }
  };
  return html`<header class="page-head"><h1><${Text} max=${120}>${data.display_name || `Session ${id.slice(0, 8)}…`}</${Text}></h1>
      ${about && html`<${Badge} kind=${STATUS[about.status.type] ?? 'idle'}>${WORDS[about.status.type] ?? about.status.type}</${Badge}>`}
      <span class="grow"></span><button onClick=${open}>Download the trace</button></header>
    <${Problem} error=${trace} />
    <dl class="facts">
      <div><dt>Id</dt><dd class="id"><code>${id}</code> <${CopyButton} text=${id} /></dd></div>
      ${about && html`<div><dt>Began</dt><dd><${When} time=${about.created_at} /></dd></div>
        <div><dt>Project</dt><dd><${Text} max=${80}>${about.project_id}</${Text}></dd></div>
        <div><dt>Checkpoints</dt><dd>${about.checkpoints_count}, ${bytes(about.checkpoint_storage_bytes)}</dd></div>`}
    </dl>
    <section class="card"><h2>Training runs (${data.training_run_ids.length})</h2>
      <ul class="links">${data.training_run_ids.slice(0, 500).map((run) => html`<li key=${run}><a href=${to.run(run)}>${run}</a></li>`)}</ul>
      ${!data.training_run_ids.length && html`<p class="muted">None.</p>`}</section>
    <section class="card"><h2>Samplers (${data.sampler_ids.length})</h2>
      <ul class="links">${data.sampler_ids.slice(0, 500).map((one) => html`<li key=${one}><code>${one}</code></li>`)}</ul>
      ${!data.sampler_ids.length && html`<p class="muted">None.</p>`}</section>
    ${Object.keys(data.user_metadata ?? {}).length > 0 && html`<section class="card"><h2>Metadata</h2><dl class="pairs">
      ${Object.entries(data.user_metadata).map(([name, value]) => html`<div key=${name}><dt><${Text}>${name}</${Text}></dt><dd><${Text} max=${2000}>${value}</${Text}></dd></div>`)}</dl></section>`}`;
}

const COLUMNS = [
  { name: 'Sampler', width: 'minmax(120px, 1fr)', narrow: 'minmax(0, 1fr)' },
  { name: 'Samples from', width: 'minmax(140px, 2fr)', narrow: 'minmax(0, 1.4fr)' },
  { name: 'Clients', width: '70px', kind: 'num wide' },
  { name: 'Created', width: '110px', kind: 'wide' },
];

/** What a sampler samples from. Unnamed weights are in no list of checkpoints, so they lead to their run. */
function Source({ sampler }) {
  if (!sampler.model_path) return html`<${Text} max=${120}>${sampler.base_model}</${Text}>`;
  const [run, , name] = sampler.model_path.replace('tinker://', '').split('/');
  return name.startsWith('.')
    ? html`<a href=${to.run(run)} title=${sampler.model_path}>unnamed weights of ${shortId(run)}</a>`
    : html`<a href=${to.checkpoint(sampler.model_path)} title=${sampler.model_path}><${Text} max=${120}>${sampler.model_path}</${Text}></a>`;
}

export function Samplers() {
  const tick = useClock(10000);
  const fetchPage = async (offset, limit) => {
    const page = await api(`api/v1/console/samplers?limit=${Math.min(limit, 500)}&offset=${offset}`);
    return { rows: page.samplers, total: page.total_count };
  };
  return html`<header class="page-head"><h1>Samplers</h1></header>
    <section class="card flush"><${VirtualList} label="Samplers" columns=${COLUMNS} fetchPage=${fetchPage} source="samplers" version=${tick} rowKey=${(one) => one.sampler_id}
      empty=${html`<${Empty} title="No samplers yet"><p>create_sampling_client makes one.</p></${Empty}>`}
      renderRow=${(one) => html`
        <${Cell}><a href=${to.session(one.session_id)} title=${one.sampler_id}>${shortId(one.sampler_id)}</a></${Cell}>
        <${Cell}><${Source} sampler=${one} /></${Cell}>
        <${Cell} kind="num wide">${one.clients}</${Cell}>
        <${Cell} kind="wide muted"><${When} time=${one.created_at} /></${Cell}>`} /></section>`;
}
