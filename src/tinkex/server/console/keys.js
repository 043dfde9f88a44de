// The keys of a server: for administrators those of all owners, with creation and revocation.

import { api, Badge, Confirm, CopyButton, Dialog, Empty, html, Loading, Problem, Text, useClock, useLoaded, useState, When } from './core.js';

const BADGES = { active: 'running', revoked: 'failed', expired: 'idle' };

function NewKey({ onClose, onCreated }) {
  const [owner, setOwner] = useState('');
  const [name, setName] = useState('');
  const [days, setDays] = useState('90');
  const [admin, setAdmin] = useState(false);
  const [made, setMade] = useState(null);
  const [error, setError] = useState(null);
  const create = async (event) => {
    event.preventDefault();
    try {
      setMade(await api('api/v1/console/keys', { method: 'POST', body: { owner, name, admin, ...(days ? { expires_days: Number(days) } : {}) } }));
      onCreated();
    } catch (failure) {
      setError(failure);
    }
  };
  if (made) {
    return html`<${Dialog} title="The new key" onClose=${onClose}>
      <p>It is shown only now; the server keeps a hash. Give it to <bdi>${made.owner}</bdi>.</p>
      <p class="id"><code>${made.key}</code> <${CopyButton} text=${made.key} label="Copy key" /></p>
      <div class="actions"><button class="primary" onClick=${onClose}>Done</button></div></${Dialog}>`;
  }
  return html`<${Dialog} title="New key" onClose=${onClose}><form class="form" onSubmit=${create}>
    <label>Owner <input required maxlength="200" value=${owner} onInput=${(event) => setOwner(event.target.value)} placeholder="alice" /></label>
    <label>Name <input maxlength="200" value=${name} onInput=${(event) => setName(event.target.value)} placeholder="laptop" /></label>
    <label>Expires in days <input type="number" min="1" max="3650" value=${days} onInput=${(event) => setDays(event.target.value)} placeholder="never" /></label>
    <label class="check"><input type="checkbox" checked=${admin} onChange=${(event) => setAdmin(event.target.checked)} /> Administrator: may manage the keys of all owners</label>
    <${Problem} error=${error} />
    <div class="actions"><button type="button" onClick=${onClose}>Cancel</button><button class="primary" type="submit">Create</button></div>
  </form></${Dialog}>`;
}

export function Keys({ session }) {
  const tick = useClock(10000);
  const { data, error, reload } = useLoaded((signal) => api('api/v1/console/keys', { signal }), [tick]);
  const [creating, setCreating] = useState(false);
  const [revoking, setRevoking] = useState(null);
  const own = revoking?.key_id === session.key_id;
  return html`<header class="page-head"><h1>Keys</h1><span class="grow"></span>
      ${session.manages_keys && html`<button class="primary" onClick=${() => setCreating(true)}>New key</button>`}</header>
    <${Problem} error=${error} />
    ${!data && !error && html`<${Loading} />`}
    ${!session.needs_keys && html`<${Empty} title="This server has no keys">
      <p>Everyone on this machine is the owner <code>local</code>, and no other machine can connect. From the first key on, every client needs one:</p>
      <pre><code>tinkex key create --admin --name me</code></pre></${Empty}>`}
    ${session.needs_keys && !session.manages_keys && html`<p class="hint muted">These are the keys of <bdi>${session.owner}</bdi>. An administrator creates and revokes keys: <code>tinkex key create --admin</code>.</p>`}
    ${data && data.keys.length > 0 && html`<section class="card flush"><div class="table-wrap" tabindex="0"><table>
      <thead><tr><th>Key</th><th>Owner</th><th class="wide">Name</th><th>State</th><th class="wide">Created</th><th class="wide">Used</th><th class="wide">Expires</th><th><span class="visually-hidden">Actions</span></th></tr></thead>
      <tbody>${data.keys.map((key) => html`<tr key=${key.key_id}>
        <td><code>${key.hint}…</code>${key.is_admin && html` <${Badge} kind="public">admin</${Badge}>`}</td>
        <td><${Text} max=${60}>${key.owner}</${Text}></td><td class="wide"><${Text} max=${60}>${key.name}</${Text}></td>
        <td><${Badge} kind=${BADGES[key.state]}>${key.state}</${Badge}></td>
        <td class="wide muted"><${When} time=${key.created_at} /></td><td class="wide muted">${key.used_at ? html`<${When} time=${key.used_at} />` : 'never'}</td>
        <td class="wide muted">${key.expires_at ? html`<${When} time=${key.expires_at} />` : 'never'}</td>
        <td class="end">${session.manages_keys && key.state === 'active' && html`<button class="danger" onClick=${() => setRevoking(key)} aria-label=${`Revoke key ${key.key_id}`}>Revoke…</button>`}</td></tr>`)}</tbody></table></div></section>`}
    ${creating && html`<${NewKey} onClose=${() => setCreating(false)} onCreated=${reload} />`}
    ${revoking && html`<${Confirm} title="Revoke this key?" action="Revoke" onClose=${() => setRevoking(null)}
      onConfirm=${async () => { await api(`api/v1/console/keys/${revoking.key_id}`, { method: 'DELETE' }); reload(); }}>
      <p>${own ? 'It is the key you signed in with: you are signed out at once. ' : ''}Programs with the key <code>${revoking.hint}…</code> of <bdi>${revoking.owner}</bdi> are refused within two seconds. The data of the owner stays. This cannot be undone.</p></${Confirm}>`}`;
}
