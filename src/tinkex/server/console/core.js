// What all pages share: the view library, requests, live events, the address, dialogs, formats.
//
// Text from models and users reaches the page only through `html`, which makes text nodes of it. No
// file of the console assigns markup (a test checks that).

import { h, render } from './vendor/preact.js';
import { useCallback, useEffect, useMemo, useRef, useState } from './vendor/preact-hooks.js';
import htm from './vendor/htm.js';

export const html = htm.bind(h);
export { render, useCallback, useEffect, useMemo, useRef, useState };

// -- requests ------------------------------------------------------------------------------------

export class ApiError extends Error {
  constructor(status, detail) {
    super(typeof detail === 'string' ? detail : JSON.stringify(detail));
    this.status = status;
  }
}

/** An address of this server; `path` has no slash at its start, so it may be below a proxy's path. */
export const address = (path) => new URL(path, document.baseURI);

/** Send a request; its JSON answer, or an ApiError. A 401 shows the sign-in. */
export async function api(path, { method = 'GET', body, signal } = {}) {
  const headers = body === undefined ? {} : { 'Content-Type': 'application/json' };
  const sent = body === undefined ? undefined : JSON.stringify(body);
  const answer = await fetch(address(path), { method, headers, body: sent, signal });
  if (!answer.ok) throw await failed(answer);
  return answer.status === 204 ? null : answer.json();
}

export async function failed(answer) {
  const text = await answer.text();
  let detail = text || answer.statusText;
  try {
    const parsed = JSON.parse(text);
    detail = parsed.detail ?? parsed.error?.message ?? detail;
    if (Array.isArray(detail)) detail = detail.map((one) => `${one.loc?.at(-1)}: ${one.msg}`).join('; ');
  } catch { /* not JSON: a proxy's page */ }
  if (answer.status === 401) window.dispatchEvent(new CustomEvent('signed-out', { detail }));
  return new ApiError(answer.status, detail);
}

/** Load once, and again when `keys` change: {data, error, reload}. */
export function useLoaded(load, keys) {
  const [state, setState] = useState({ data: null, error: null });
  const [version, setVersion] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    load(stop.signal).then(
      (data) => stop.signal.aborted || setState({ data, error: null }),
      (error) => stop.signal.aborted || setState((old) => ({ ...old, error })),
    );
    return () => stop.abort();
  }, [...keys, version]);
  return { ...state, reload: useCallback(() => setVersion((one) => one + 1), []) };
}

// -- live events ---------------------------------------------------------------------------------

const streams = { wanted: 0, open: 0, listeners: new Set() };

function countStreams(name, change) {
  streams[name] += change;
  for (const listener of streams.listeners) listener(streamState());
}

const streamState = () => (streams.open ? 'live' : streams.wanted ? 'waiting' : 'none');

/** `live` while a stream of events is open, `waiting` while it should be, `none` on other pages. */
export function useStreamState() {
  const [state, setState] = useState(streamState());
  useEffect(() => {
    streams.listeners.add(setState);
    return () => streams.listeners.delete(setState);
  }, []);
  return state;
}

/**
 * Follow the server's events until the returned function is called.
 *
 * `queryOf` is called for every connection: a later one asks only for what the page does not have yet.
 * A hidden page closes its stream, because a browser has few connections to one server for all tabs.
 */
export function live(queryOf, handlers) {
  let source = null;
  let isOpen = false;
  let timer = 0;
  let isOver = false;
  const mark = (open) => {
    if (open !== isOpen) countStreams('open', open ? 1 : -1);
    isOpen = open;
  };
  const close = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
    mark(false);
  };
  const open = () => {
    if (source || isOver || document.hidden) return;
    source = new EventSource(address(`api/v1/console/live?${queryOf()}`));
    source.onopen = () => mark(true);
    source.onerror = () => {
      close(); // the browser itself would try again with the same address
      // If the key has ended, this shows the sign-in.
      const again = () => { timer = setTimeout(open, 3000); };
      api('api/v1/console/session').then(again, (error) => error.status !== 401 && again());
    };
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
    }
  };
  const changed = () => (document.hidden ? close() : open());
  document.addEventListener('visibilitychange', changed);
  countStreams('wanted', 1);
  open();
  return () => {
    isOver = true;
    document.removeEventListener('visibilitychange', changed);
    close();
    countStreams('wanted', -1);
  };
}

// -- the address ---------------------------------------------------------------------------------

const ROOT = new URL(document.baseURI).pathname;

/** A part of an address. What cannot be decoded is no name of anything, and is then not found. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** The page and its parameters, from the address. */
export function place() {
  const path = location.pathname.startsWith(ROOT) ? location.pathname.slice(ROOT.length) : '';
  return {
    parts: path.split('/').filter(Boolean).map(decoded),
    query: new URLSearchParams(location.search),
  };
}

export function navigate(to, { replace = false } = {}) {
  const url = address(to);
  if (url.href === location.href) return;
  history[replace ? 'replaceState' : 'pushState'](null, '', url);
  window.dispatchEvent(new Event('moved'));
  if (!replace) window.scrollTo(0, 0);
}

export function setQuery(changes) {
  const { query } = place();
  for (const [name, value] of Object.entries(changes)) {
    if (value) query.set(name, value);
    else query.delete(name);
  }
  const text = query.toString();
  navigate(location.pathname + (text ? `?${text}` : ''), { replace: true });
}

/** Links of the console change the page without loading it again. */
export function followLinks() {
  document.addEventListener('click', (event) => {
    const link = event.target.closest?.('a[href]');
    const plain = event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
    if (!link || !plain || link.target || link.hasAttribute('download') || link.origin !== location.origin) return;
    const path = link.pathname.slice(ROOT.length);
    if (/^(api|docs|openapi\.json|metrics|readyz)\b/.test(path)) return;
    event.preventDefault();
    navigate(link.href);
  });
}

export const to = {
  run: (id) => `training_runs/${encodeURIComponent(id)}`,
  session: (id) => `sessions/${encodeURIComponent(id)}`,
  checkpoint: (path) => {
    const [run, kind, name] = path.replace('tinker://', '').split('/');
    return `checkpoints/${encodeURIComponent(run)}/${encodeURIComponent(`${kind}/${name}`)}`;
  },
  playground: (path) => `playground?mode=checkpoint&checkpoint=${encodeURIComponent(path)}`,
};

/** The route of a checkpoint below `api/v1`. */
export function checkpointRoute(path) {
  const [run, kind, name] = path.replace('tinker://', '').split('/').map(encodeURIComponent);
  return `api/v1/training_runs/${run}/checkpoints/${kind}/${name}`;
}

// -- settings of this browser ----------------------------------------------------------------------

export function useStored(name, initial) {
  const [value, setValue] = useState(() => {
    try {
      return JSON.parse(localStorage.getItem(`tinkex.${name}`)) ?? initial;
    } catch {
      return initial;
    }
  });
  const set = useCallback((next) => {
    setValue(next);
    localStorage.setItem(`tinkex.${name}`, JSON.stringify(next));
  }, []);
  return [value, set];
}

// -- small parts -----------------------------------------------------------------------------------

// Characters that turn the direction of a text around are shown as their codes: a name cannot pretend
// to be another one.
const TURNS = /[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** A text of a user: cut, and isolated from the direction of the text around it. */
export const Text = ({ children, max = 300 }) => {
  const text = String(children ?? '').slice(0, max + 1).replace(TURNS, (one) => `\\u${one.charCodeAt(0).toString(16)}`);
  return html`<bdi>${text.length > max ? `${text.slice(0, max)}…` : text}</bdi>`;
};

export const Badge = ({ kind, children }) => html`<span class="badge ${kind}">${children ?? kind}</span>`;

export const Empty = ({ title, children }) => html`
  <div class="empty"><p class="empty-title">${title}</p>${children}</div>`;

export const Problem = ({ error }) => error && html`
  <p class="problem" role="alert">${error.status === 404 ? 'Not found: ' : ''}${error.message.slice(0, 600)}</p>`;

export const Loading = () => html`<p class="muted pad" role="status">Loading…</p>`;

export function CopyButton({ text, label = 'Copy' }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard?.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1200);
  };
  return html`<button class="quiet" onClick=${copy} aria-label=${`${label}: ${text.slice(0, 120)}`}>${copied ? 'Copied' : label}</button>`;
}

/** Tabs whose choice is in the address. */
export function Tabs({ tabs, current, name = 'tab' }) {
  return html`<nav class="tabs" aria-label="Parts of this page">
    ${tabs.map(([id, label]) => html`
      <button key=${id} aria-current=${id === current ? 'page' : undefined} onClick=${() => setQuery({ [name]: id })}>${label}</button>`)}
  </nav>`;
}

/** A dialog above the page. `onClose` is called for Escape, too. */
export function Dialog({ title, onClose, children }) {
  const element = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    // A browser gives the focus back only when a dialog closes, not when it is removed.
    return () => before?.focus();
  }, []);
  return html`<dialog ref=${element} aria-label=${title} onClose=${onClose}>
    <h2>${title}</h2>${children}
  </dialog>`;
}

/** Ask before something that cannot be undone. */
export function Confirm({ title, action, children, onClose, onConfirm }) {
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const confirm = async () => {
    setBusy(true);
    try {
      await onConfirm();
      onClose();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${title} onClose=${onClose}>
    ${children}<${Problem} error=${error} />
    <div class="actions">
      <button onClick=${onClose}>Cancel</button>
      <button class="danger" disabled=${busy} onClick=${confirm}>${action}</button>
    </div>
  </${Dialog}>`;
}

// -- formats -------------------------------------------------------------------------------------

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return Number(value.toPrecision(digits)).toLocaleString('en-US', { maximumFractionDigits: 6 });
}

export const count = (value) => (value ?? 0).toLocaleString('en-US');

export function short(value) {
  if (value < 1000) return String(Math.round(value));
  return Intl.NumberFormat('en-US', { notation: 'compact', maximumFractionDigits: 1 }).format(value);
}

export function bytes(size) {
  if (size === null || size === undefined) return '–';
  const units = ['B', 'KB', 'MB', 'GB', 'TB'];
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit && size < 10 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

export function duration(seconds) {
  if (!(seconds >= 0)) return '–';
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function ago(time) {
  if (!time) return '–';
  const seconds = (Date.now() - new Date(time)) / 1000;
  if (seconds < 0) return `in ${duration(-seconds)}`;
  if (seconds < 5) return 'now';
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} d ago`;
}

export const When = ({ time }) => (time
  ? html`<time datetime=${time} title=${new Date(time).toLocaleString()}>${ago(time)}</time>`
  : html`<span>–</span>`);

/**
 * A number that moves on while the page is visible, so that ages on an open page stay right. Pages
 * without live events also load their data again when it changes.
 */
export function useClock(everyMs = 5000) {
  const [tick, setTick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || setTick((one) => one + 1), everyMs);
    return () => clearInterval(timer);
  }, []);
  return tick;
}

export const runName = (run) => run.user_metadata?.name || run.user_metadata?.run_name || shortId(run.training_run_id);
export const shortId = (id) => {
  const [session, ...rest] = id.split(':');
  return session.length > 12 ? [`${session.slice(0, 8)}…`, ...rest].join(':') : id;
};
export const sessionOf = (id) => id.split(':')[0];

/** Save text or a blob as a file. */
export function save(name, content, type = 'text/plain') {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const link = document.createElement('a');
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.-]+/g, '_').slice(0, 120);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
