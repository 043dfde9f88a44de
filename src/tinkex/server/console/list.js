// A list of any length: only the visible rows are on the page, and one request loads what a scroll shows.

import { html, Loading, Problem, useCallback, useEffect, useRef, useState } from './core.js';

const OVERSCAN = 8;
const MARGIN = 40;
const SETTLE_MS = 90;

/**
 * `fetchPage(offset, limit)` resolves to {rows, total}. `source` names what is listed: if it changes,
 * the list begins again; if `version` changes, the visible rows are loaded again.
 */
export function VirtualList({ label, columns, fetchPage, source, version = 0, rowHeight = 44, rowKey, renderRow, empty, onRows, minHeight = 320 }) {
  const [state, setState] = useState({ rows: new Map(), total: null, error: null });
  const [view, setView] = useState({ top: 0, height: 600 });
  const element = useRef(null);
  const requests = useRef(0);
  const isReloading = useRef(false);
  const isStale = useRef(false);
  const latest = useRef(state);
  latest.current = state;
  const fetcher = useRef(fetchPage);
  fetcher.current = fetchPage;

  const visible = () => {
    const top = element.current?.scrollTop ?? 0;
    const height = element.current?.clientHeight || 600;
    return { first: Math.floor(top / rowHeight), last: Math.ceil((top + height) / rowHeight) };
  };

  const load = useCallback((forced) => {
    const { first, last } = visible();
    const { rows, total } = latest.current;
    const end = Math.min(last, total ?? last);
    let missing = forced;
    for (let index = first; index < end && !missing; index += 1) missing = !rows.has(index);
    return missing ? request(Math.max(0, first - MARGIN), last - first + 2 * MARGIN, forced) : null;
  }, [source]);

  // Changes may come faster than answers: those during a reload lead to one more after it.
  const reload = async () => {
    isStale.current = true;
    if (isReloading.current) return;
    isReloading.current = true;
    while (isStale.current) {
      isStale.current = false;
      await load(true);
    }
    isReloading.current = false;
  };

  const request = async (offset, limit, replaces) => {
    requests.current += 1;
    const mine = requests.current;
    let size = limit;
    while (true) {
      try {
        const page = await fetcher.current(offset, size);
        if (mine !== requests.current) return;
        setState((current) => {
          // Rows that were loaded before may have moved.
          const rows = new Map(replaces ? [] : current.rows);
          page.rows.forEach((row, index) => rows.set(offset + index, row));
          return { rows, total: page.total, error: null };
        });
        return;
      } catch (error) {
        if (mine !== requests.current) return;
        // An answer over the server's limit says so: rows with very long texts come in smaller pages.
        if (error.status === 400 && size > 1) size = Math.ceil(size / 4);
        else return setState((current) => ({ ...current, error }));
      }
    }
  };

  useEffect(() => {
    setState({ rows: new Map(), total: null, error: null });
    if (element.current) element.current.scrollTop = 0;
    request(0, 100);
  }, [source]);
  useEffect(() => { if (version) reload(); }, [version]);

  useEffect(() => {
    const box = element.current;
    let timer = 0;
    const moved = () => {
      setView({ top: box.scrollTop, height: box.clientHeight });
      clearTimeout(timer);
      timer = setTimeout(() => load(false), SETTLE_MS);
    };
    const watcher = new ResizeObserver(moved);
    watcher.observe(box);
    box.addEventListener('scroll', moved, { passive: true });
    return () => {
      clearTimeout(timer);
      watcher.disconnect();
      box.removeEventListener('scroll', moved);
    };
  }, [load]);

  const total = state.total ?? 0;
  const first = Math.max(0, Math.floor(view.top / rowHeight) - OVERSCAN);
  const last = Math.min(total, Math.ceil((view.top + view.height) / rowHeight) + OVERSCAN);
  const shown = [];
  for (let index = first; index < last; index += 1) shown.push([index, state.rows.get(index)]);
  useEffect(() => { onRows?.(shown.map(([, row]) => row).filter(Boolean), state); }, [state.rows, first, last]);

  // Arrow keys and j, k move between rows; the browser keeps the focused row in view.
  const onKeyDown = (event) => {
    const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (!step || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== 'checkbox') return;
    const row = event.target.closest('[data-index]');
    const index = row ? Number(row.dataset.index) + step : first;
    if (index < 0 || index >= total) return;
    event.preventDefault();
    const box = element.current;
    const top = index * rowHeight;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + rowHeight > box.scrollTop + box.clientHeight) box.scrollTop = top + rowHeight - box.clientHeight;
    requestAnimationFrame(() => requestAnimationFrame(() => {
      box.querySelector(`[data-index="${index}"] a, [data-index="${index}"] button`)?.focus({ preventScroll: true });
    }));
  };

  // A narrow page hides the columns of the kind `wide`.
  const narrow = columns.filter((column) => !column.kind?.includes('wide')).map((column) => column.narrow ?? column.width).join(' ');
  const widths = { '--columns': columns.map((column) => column.width).join(' '), '--narrow-columns': narrow };
  return html`<div class="list" role="table" aria-label=${label} aria-rowcount=${total + 1} onKeyDown=${onKeyDown} style=${widths}>
    <div class="list-head" role="rowgroup"><div class="row" role="row">
      ${columns.map((column) => html`<span key=${column.name} role="columnheader" class=${column.kind ?? ''}>${column.name}</span>`)}
    </div></div>
    ${state.error && html`<div role="rowgroup"><${OnlyRow}><${Problem} error=${state.error} /></${OnlyRow}></div>`}
    <div class="list-body" ref=${element} role="rowgroup" tabindex="0" aria-label=${`${label}, ${total} rows`}
      style=${total ? { height: `${Math.min(total * rowHeight + 2, Math.max(minHeight, innerHeight * 0.62))}px` } : null}>
      ${state.total === null && !state.error && html`<${OnlyRow}><${Loading} /></${OnlyRow}>`}
      ${state.total === 0 && html`<${OnlyRow}>${empty}</${OnlyRow}>`}
      <div class="spacer" role="presentation" style=${{ height: `${total * rowHeight}px` }}>
        ${shown.map(([index, row]) => html`<div key=${row ? rowKey(row) : index} role="row" data-index=${index} aria-rowindex=${index + 2}
          class="row ${row ? '' : 'pending'}" style=${{ transform: `translateY(${index * rowHeight}px)`, height: `${rowHeight}px` }}>
          ${row ? renderRow(row, index) : html`<span role="cell">…</span>`}
        </div>`)}
      </div>
    </div>
  </div>`;
}

// A table may contain rows only, also when it has nothing to show.
const OnlyRow = ({ children }) => html`<div role="row"><div role="cell">${children}</div></div>`;

export const Cell = ({ kind = '', children }) => html`<span role="cell" class=${kind}>${children}</span>`;
