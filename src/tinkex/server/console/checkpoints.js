// Checkpoints: lists, and what can be done with one: download, publish, set a time to live, delete.

import { address, api, Badge, bytes, checkpointRoute, Confirm, CopyButton, Dialog, Empty, html, Loading, Problem, shortId, Text, to, useClock, useLoaded, useState, When } from './core.js';
import { Cell, VirtualList } from './list.js';

const COLUMNS = [
  { name: 'Name', width: 'minmax(130px, 2fr)', narrow: 'minmax(0, 1fr)' },
  { name: 'Kind', width: '96px', narrow: '64px' },
  { name: 'Run', width: 'minmax(90px, 1fr)', kind: 'wide' },
  { name: 'Size', width: '80px', kind: 'num wide' },
  { name: 'Saved', width: '100px', kind: 'wide' },
  { name: 'Expires', width: '100px', kind: 'wide' },
  { name: 'Actions', width: '104px', narrow: '84px', kind: 'end' },
];
const DAY = 86400;

const parts = (path) => path.replace('tinker://', '').split('/');
const canDownload = (one) => one.checkpoint_type !== 'external';

export function CheckpointTable({ fetchPage, source, version = 0, onChange }) {
  const [opened, setOpened] = useState(null);
  const [changes, setChanges] = useState(0);
  const changed = () => {
    setChanges((one) => one + 1);
    onChange?.();
  };
  return html`<section class="card flush"><${VirtualList} label="Checkpoints" columns=${COLUMNS} fetchPage=${fetchPage} source=${source} version=${version + changes}
    rowKey=${(one) => one.tinker_path} minHeight=${240}
    empty=${html`<${Empty} title="No checkpoints"><p>save_state and save_weights_for_sampler create them.</p></${Empty}>`}
    renderRow=${(one) => html`
      <${Cell} kind="name"><a href=${to.checkpoint(one.tinker_path)} title=${one.tinker_path}><${Text} max=${100}>${parts(one.tinker_path)[2]}</${Text}></a>
        ${one.public && html` <${Badge} kind="public" />`}</${Cell}>
      <${Cell}><span class="muted">${one.checkpoint_type}</span></${Cell}>
      <${Cell} kind="wide"><a href=${to.run(parts(one.tinker_path)[0])}>${shortId(parts(one.tinker_path)[0])}</a></${Cell}>
      <${Cell} kind="num wide">${bytes(one.size_bytes)}</${Cell}>
      <${Cell} kind="wide muted"><${When} time=${one.time} /></${Cell}>
      <${Cell} kind="wide muted">${one.expires_at ? html`<${When} time=${one.expires_at} />` : 'never'}</${Cell}>
      <${Cell} kind="end"><button onClick=${() => setOpened(one)} aria-haspopup="dialog" aria-label=${`Actions of ${parts(one.tinker_path)[2].slice(0, 80)}`}>Actions</button></${Cell}>`} />
    ${opened && html`<${Dialog} title=${`Checkpoint ${parts(opened.tinker_path)[2].slice(0, 80)}`} onClose=${() => setOpened(null)}>
      <${Actions} checkpoint=${opened} onChange=${() => { setOpened(null); changed(); }} />
      <div class="actions"><button onClick=${() => setOpened(null)}>Close</button></div>
    </${Dialog}>`}
  </section>`;
}

/** The buttons of one checkpoint. */
export function Actions({ checkpoint, onChange }) {
  const [asking, setAsking] = useState(null);
  const [error, setError] = useState(null);
  const [days, setDays] = useState('7');
  const route = checkpointRoute(checkpoint.tinker_path);
  const change = async (path, options) => {
    try {
      await api(route + path, options);
      onChange();
    } catch (failure) {
      setError(failure);
    }
  };
  const seconds = Math.round(Number(days) * DAY);
  return html`<div class="checkpoint-actions">
    <p class="id"><code>${checkpoint.tinker_path}</code> <${CopyButton} text=${checkpoint.tinker_path} label="Copy path" /></p>
    <${Problem} error=${error} />
    <div class="button-row">
      ${canDownload(checkpoint) && html`<a class="button" href=${address(`${route}/archive`).href} download>Download</a>`}
      ${checkpoint.checkpoint_type === 'sampler' && html`<a class="button" href=${to.playground(checkpoint.tinker_path)}>Playground</a>`}
      ${checkpoint.public
        ? html`<button onClick=${() => change('/publish', { method: 'DELETE' })}>Unpublish</button>`
        : html`<button onClick=${() => setAsking('publish')}>Publish…</button>`}
      <button class="danger" onClick=${() => setAsking('delete')}>Delete…</button>
    </div>
    <form class="button-row" onSubmit=${(event) => { event.preventDefault(); change('/ttl', { method: 'PUT', body: { ttl_seconds: seconds } }); }}>
      <label>Expires in <input type="number" min="0.01" max="3650" step="any" required value=${days} onInput=${(event) => setDays(event.target.value)} /> days</label>
      <button type="submit">Set</button>
      ${checkpoint.expires_at && html`<button type="button" onClick=${() => change('/ttl', { method: 'PUT', body: { ttl_seconds: null } })}>Keep for good</button>`}
    </form>
    ${asking === 'delete' && html`<${Confirm} title="Delete this checkpoint?" action="Delete" onClose=${() => setAsking(null)}
      onConfirm=${async () => { await api(route, { method: 'DELETE' }); onChange(); }}>
      <p>Its path stops working for everyone, and its files are deleted. This cannot be undone.</p>
      <p class="id"><code>${checkpoint.tinker_path}</code></p></${Confirm}>`}
    ${asking === 'publish' && html`<${Confirm} title="Publish this checkpoint?" action="Publish" onClose=${() => setAsking(null)}
      onConfirm=${async () => { await api(`${route}/publish`, { method: 'POST' }); onChange(); }}>
      <p>Every owner of this server can then read it, by its path and in lists. Nothing else of the run is shown to them.</p></${Confirm}>`}
  </div>`;
}

export function Checkpoints() {
  const tick = useClock(10000);
  const [scope, setScope] = useState('owned');
  const fetchPage = async (offset, limit) => {
    const page = await api(`api/v1/checkpoints?limit=${limit}&offset=${offset}&access_scope=${scope}`);
    return { rows: page.checkpoints, total: page.cursor.total_count };
  };
  return html`<header class="page-head"><h1>Checkpoints</h1><span class="grow"></span>
      <label>Show <select value=${scope} onChange=${(event) => setScope(event.target.value)}>
        <option value="owned">mine</option><option value="accessible">mine and published</option></select></label></header>
    <${CheckpointTable} fetchPage=${fetchPage} source=${`all ${scope}`} version=${tick} />`;
}

export function Checkpoint({ run, name }) {
  useClock();
  const path = `tinker://${run}/${name}`;
  const load = async (signal) => {
    const list = await api(`api/v1/training_runs/${encodeURIComponent(run)}/checkpoints?access_scope=accessible`, { signal });
    const found = list.checkpoints.find((one) => one.tinker_path === path);
    if (!found) throw Object.assign(new Error(`there is no checkpoint ${path} on this server.`), { status: 404 });
    return found;
  };
  const { data, error, reload } = useLoaded(load, [path]);
  if (error) return html`<h1>Checkpoint</h1><${Problem} error=${error} />`;
  if (!data) return html`<${Loading} />`;
  return html`<header class="page-head"><h1><${Text} max=${100}>${parts(path)[2]}</${Text}></h1>${data.public && html`<${Badge} kind="public" />`}</header>
    <dl class="facts">
      <div><dt>Kind</dt><dd>${data.checkpoint_type}</dd></div>
      <div><dt>Size</dt><dd>${bytes(data.size_bytes)}</dd></div>
      <div><dt>Saved</dt><dd><${When} time=${data.time} /></dd></div>
      <div><dt>Expires</dt><dd>${data.expires_at ? html`<${When} time=${data.expires_at} />` : 'never'}</dd></div>
      <div><dt>Run</dt><dd><a href=${to.run(run)}>${shortId(run)}</a></dd></div>
    </dl>
    <section class="card"><${Actions} checkpoint=${data} onChange=${reload} /></section>`;
}
