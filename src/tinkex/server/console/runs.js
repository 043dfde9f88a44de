// The page of runs: curves of the chosen ones, and the list of all.

import { api, Badge, Empty, html, live, navigate, number, count, place, runName, setQuery, shortId, Text, to, useClock, useEffect, useMemo, useRef, useState, When } from './core.js';
import { Chart, COLORS, metricsOf, SmallChart } from './chart.js';
import { Cell, VirtualList } from './list.js';

const MAX_CURVES = 10;
const NEWEST_CURVES = 5;
/** Metrics in small charts, when runs are compared. */
const SMALL = 5;
const POINTS = 600;

const COLUMNS = [
  { name: 'Compare', width: '20px', narrow: '18px', kind: 'visually-hidden' },
  { name: 'Run', width: 'minmax(150px, 2.2fr)', narrow: 'minmax(0, 1fr)' },
  { name: 'Status', width: '92px', narrow: '86px' },
  { name: 'Base model', width: 'minmax(110px, 1.4fr)', kind: 'wide' },
  { name: 'Rank', width: '52px', kind: 'wide num' },
  { name: 'Steps', width: '76px', kind: 'wide num' },
  { name: 'Loss', width: '84px', narrow: '60px', kind: 'num' },
  { name: 'Last request', width: '110px', kind: 'wide' },
];

const loadPoints = async (id) => (await api(`api/v1/training_runs/${encodeURIComponent(id)}/metrics?points=${POINTS}`)).points;

const extended = (points, fresh) => {
  const last = lastStep(points);
  const later = fresh.filter((point) => point.step > last);
  return later.length ? [...points, ...later] : points;
};

/**
 * The points of some runs: loaded once, then extended by live events. `latest` is a ref to them.
 *
 * A curve that has become long is loaded again, so that a page that stays open does not grow.
 */
export function useCurves(ids) {
  const [curves, setCurves] = useState({});
  const latest = useRef(curves);
  latest.current = curves;
  const [loaded, setLoaded] = useState('');
  const key = ids.join();
  useEffect(() => {
    let isCurrent = true;
    const missing = ids.filter((id) => !curves[id]);
    Promise.all(missing.map(async (id) => {
      const points = await loadPoints(id).catch(() => []);
      return [id, points];
    })).then((found) => {
      if (!isCurrent) return;
      setCurves((old) => ({ ...old, ...Object.fromEntries(found) }));
      setLoaded(key);
    });
    return () => { isCurrent = false; };
  }, [key]);
  const add = (id, points) => setCurves((old) => {
    if (!old[id]) return old;
    const all = extended(old[id], points);
    return all === old[id] ? old : { ...old, [id]: all };
  });
  const reloading = useRef(new Set());
  useEffect(() => {
    for (const id of ids) {
      if (!(curves[id]?.length > 2 * POINTS) || reloading.current.has(id)) continue;
      reloading.current.add(id);
      loadPoints(id)
        .then((points) => setCurves((old) => ({ ...old, [id]: extended(points, old[id]) })))
        .catch(() => null) // the next step tries again
        .then(() => reloading.current.delete(id));
    }
  }, [curves]);
  return { curves, latest, add, loaded: loaded === key ? key : null };
}

export const lastStep = (points) => points?.at(-1)?.step ?? 0;

export function Runs() {
  useClock();
  const { query } = place();
  const chosen = useMemo(() => (query.get('compare') || '').split(',').filter(Boolean).slice(0, MAX_CURVES), [query.get('compare')]);
  const search = query.get('search') || '';
  const [typed, setTyped] = useState(search);
  const [version, setVersion] = useState(0);
  const [visible, setVisible] = useState([]);
  const [total, setTotal] = useState(null);
  const [changes, setChanges] = useState({});
  const [known, setKnown] = useState({});
  const newest = useRef([]);
  // Without a choice, the chart shows the newest runs that have steps.
  const [automatic, setAutomatic] = useState([]);
  const shown = chosen.length ? chosen : automatic;
  const { curves, latest, add, loaded } = useCurves(shown);

  useEffect(() => {
    const timer = setTimeout(() => setQuery({ search: typed }), 250);
    return () => clearTimeout(timer);
  }, [typed]);

  useEffect(() => {
    const missing = chosen.filter((id) => !known[id]);
    Promise.all(missing.map((id) => api(`api/v1/training_runs/${encodeURIComponent(id)}`).catch(() => null))).then((found) => {
      const runs = found.filter(Boolean);
      if (runs.length) setKnown((old) => ({ ...old, ...Object.fromEntries(runs.map((run) => [run.training_run_id, run])) }));
    });
  }, [chosen]);

  const ids = useMemo(() => [...new Set([...shown, ...visible])].slice(0, 60), [shown.join(), visible.join()]);
  const isReady = loaded !== null;
  useEffect(() => {
    if (!isReady) return undefined;
    const queryOf = () => {
      const params = new URLSearchParams({ runs: 'true' });
      for (const id of ids) {
        params.append('run', id);
        // Rows without a curve need no points: of them, only what follows a step far away.
        params.append('after', shown.includes(id) ? lastStep(latest.current[id]) : Number.MAX_SAFE_INTEGER);
      }
      return params;
    };
    let before = null;
    return live(queryOf, {
      runs: (event) => {
        if (before !== null && before !== event.total) setVersion((one) => one + 1);
        before = event.total;
      },
      run: ({ points, ...change }) => {
        setChanges((old) => ({ ...old, [change.training_run_id]: change }));
        if (points.length) add(change.training_run_id, points);
      },
    });
  }, [ids.join(), isReady]);

  const fetchPage = async (offset, limit) => {
    const text = search ? `&search=${encodeURIComponent(search)}` : '';
    const page = await api(`api/v1/training_runs?limit=${limit}&offset=${offset}${text}`);
    const rows = page.training_runs;
    setTotal(page.cursor.total_count);
    setKnown((old) => ({ ...old, ...Object.fromEntries(rows.map((run) => [run.training_run_id, run])) }));
    if (offset === 0 && !search) {
      newest.current = rows;
      const best = rows.filter((run) => run.steps > 0).slice(0, NEWEST_CURVES).map((run) => run.training_run_id);
      setAutomatic((old) => (old.join() === best.join() ? old : best));
    }
    return { rows, total: page.cursor.total_count };
  };

  const toggle = (id) => {
    const next = chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id].slice(-MAX_CURVES);
    setQuery({ compare: next.join(',') });
  };

  const series = useMemo(() => shown.filter((id) => curves[id]).map((id, index) => ({
    id,
    label: known[id] ? runName(known[id]) : shortId(id),
    color: COLORS[index % COLORS.length],
    points: curves[id],
    href: to.run(id),
  })), [shown.join(), curves, known]);

  const renderRow = (run) => {
    const now = { ...run, ...changes[run.training_run_id] };
    const id = run.training_run_id;
    const index = shown.indexOf(id);
    return html`
      <${Cell} kind="middle"><input type="checkbox" checked=${chosen.includes(id)} onChange=${() => toggle(id)}
        aria-label=${`Compare ${runName(run).slice(0, 80)}`} /></${Cell}>
      <${Cell} kind="name">
        <span class="swatch ${index < 0 ? 'none' : ''}" style=${index < 0 ? {} : { background: COLORS[index % COLORS.length] }}></span>
        <a href=${to.run(id)} title=${id}><${Text} max=${120}>${runName(run)}</${Text}></a></${Cell}>
      <${Cell}><${Badge} kind=${now.status ?? 'idle'} /></${Cell}>
      <${Cell} kind="wide muted"><${Text} max=${80}>${run.base_model}</${Text}></${Cell}>
      <${Cell} kind="wide num">${run.lora_rank}</${Cell}>
      <${Cell} kind="wide num">${count(now.steps)}</${Cell}>
      <${Cell} kind="num">${number(now.last_loss)}</${Cell}>
      <${Cell} kind="wide muted"><${When} time=${now.last_request_time} /></${Cell}>`;
  };

  return html`
    <header class="page-head"><h1>Training runs</h1>
      ${total !== null && html`<span class="muted">${count(total)} ${search ? 'found' : total === 1 ? 'run' : 'runs'}</span>`}
      <span class="grow"></span>
      <label class="search"><span class="visually-hidden">Search runs</span>
        <input type="search" placeholder="Search name, id, model" value=${typed} onInput=${(event) => setTyped(event.target.value)} maxlength="200" /></label>
    </header>
    ${series.length > 0 && html`<${Chart} series=${series} name="runs" title=${chosen.length ? 'Chosen runs' : 'Newest runs'}
      onRemove=${chosen.length ? toggle : null} />`}
    ${chosen.length > 0 && html`<div class="small-charts">${metricsOf(series).filter((one) => one !== 'loss').slice(0, SMALL).map((metric) => html`
        <${SmallChart} key=${metric} series=${series} metric=${metric} />`)}</div>
      <p class="hint"><button class="quiet" onClick=${() => setQuery({ compare: '' })}>Clear the comparison</button></p>`}
    <section class="card flush"><${VirtualList} label="Training runs" columns=${COLUMNS} fetchPage=${fetchPage} source=${`runs ${search}`} version=${version}
      rowKey=${(run) => run.training_run_id} renderRow=${renderRow}
      onRows=${(rows) => setVisible((old) => {
        const next = rows.map((run) => run.training_run_id).slice(0, 50);
        return old.join() === next.join() ? old : next;
      })}
      empty=${search ? html`<${Empty} title="Nothing found" />` : html`<${Empty} title="No training runs yet">
        <p>Start one with your key. It appears here with its first step:</p>
        <pre><code>${`export TINKER_BASE_URL=${document.baseURI.replace(/\/$/, '')}\npython your_program.py`}</code></pre></${Empty}>`} />
    </section>`;
}
