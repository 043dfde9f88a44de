// The console: signing in, navigation, and which page an address shows.

import { api, followLinks, html, navigate, place, Problem, render, useStreamState, useEffect, useState, useStored } from './core.js';

// Each page is loaded when it is first shown.
const PAGES = {
  training_runs: { label: 'Runs', icon: 'M3 17c4 0 4-10 8-10s4 6 10 6', load: () => import('./runs.js'), show: (found) => found.Runs },
  checkpoints: { label: 'Checkpoints', icon: 'M5 4h11l3 3v13H5z M8 4v5h7V4 M8 20v-6h8v6', load: () => import('./checkpoints.js'), show: (found, [, run, ...name]) => (run ? () => html`<${found.Checkpoint} run=${run} name=${name.join('/')} />` : found.Checkpoints) },
  playground: { label: 'Playground', icon: 'M4 5h16v11H11l-4 4v-4H4z', load: () => import('./playground.js'), show: (found) => found.Playground },
  sessions: { label: 'Sessions', icon: 'M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16z M12 8v4l3 2', load: () => import('./sessions.js'), show: (found, [, id]) => (id ? () => html`<${found.Session} id=${id} />` : found.Sessions) },
  samplers: { label: 'Samplers', icon: 'M5 20V10 M10 20V4 M15 20v-8 M20 20V7', load: () => import('./sessions.js'), show: (found) => found.Samplers },
  server: { label: 'Server', icon: 'M4 5h16v6H4z M4 13h16v6H4z M8 8h.01 M8 16h.01', load: () => import('./server.js'), show: (found) => found.Server },
  usage: { label: 'Usage', icon: 'M4 20h16 M7 20v-6 M12 20V8 M17 20V4', load: () => import('./usage.js'), show: (found) => found.Usage },
  keys: { label: 'Keys', icon: 'M15 9a4 4 0 1 0-3.5 4L9 15.500v2H7v2H4v-3l6-6', load: () => import('./keys.js'), show: (found) => found.Keys },
};

const Icon = ({ path }) => html`<svg viewBox="0 0 24 24" width="18" height="18" aria-hidden="true" fill="none" stroke="currentColor" stroke-width="1.8" stroke-linecap="round" stroke-linejoin="round"><path d=${path} /></svg>`;

const THEMES = ['auto', 'light', 'dark'];

function useTheme() {
  const [theme, setTheme] = useStored('theme', 'auto');
  useEffect(() => {
    const system = matchMedia('(prefers-color-scheme: dark)');
    const apply = () => {
      document.documentElement.dataset.theme = theme === 'auto' ? (system.matches ? 'dark' : 'light') : theme;
      window.dispatchEvent(new Event('theme'));
    };
    apply();
    system.addEventListener('change', apply);
    return () => system.removeEventListener('change', apply);
  }, [theme]);
  return [theme, () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length])];
}

function SignIn({ onSignedIn, reason }) {
  const [key, setKey] = useState('');
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const send = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      await api('api/v1/console/sign_in', { method: 'POST', body: { key } });
      onSignedIn();
    } catch (failure) {
      setError(failure);
    }
    setBusy(false);
  };
  return html`<main class="sign-in"><form class="card" onSubmit=${send}>
    <img src="console/icon.svg" alt="" width="44" height="44" />
    <h1>tinkex</h1><p class="muted">Sign in with an API key of this server.</p>
    ${reason && !error && html`<p class="problem" role="alert">${reason}</p>`}
    <label>API key <input type="password" name="key" autocomplete="current-password" required autofocus value=${key} placeholder="tml-…" maxlength="3000"
      onInput=${(event) => setKey(event.target.value)} /></label>
    <${Problem} error=${error} />
    <button class="primary" type="submit" disabled=${busy || !key}>Sign in</button>
    <p class="muted small">The key is sent once. This browser keeps a cookie for a week, which ends with the key. The administrator creates keys with <code>tinkex key create</code>.</p>
  </form></main>`;
}

function Page({ session }) {
  const { parts } = place();
  const name = parts[0] in PAGES ? parts[0] : 'training_runs';
  const isRun = name === 'training_runs' && parts.length > 1;
  const key = isRun ? `run ${parts[1]}` : `${name} ${parts.slice(1).join('/')}`;
  const [page, setPage] = useState(null);
  useEffect(() => {
    let isCurrent = true;
    const load = isRun ? import('./run.js') : PAGES[name].load();
    load.then((found) => {
      if (!isCurrent) return;
      const view = isRun ? (() => html`<${found.Run} id=${parts[1]} />`) : PAGES[name].show(found, parts);
      setPage({ key, view });
      document.title = `${PAGES[name].label} · tinkex`;
    });
    return () => { isCurrent = false; };
  }, [key]);
  if (page?.key !== key) return html`<p class="muted pad" role="status">Loading…</p>`;
  return html`<${page.view} key=${key} session=${session} />`;
}

function Shell({ session, onSignOut, theme, nextTheme }) {
  const [, setMoves] = useState(0);
  const stream = useStreamState();
  useEffect(() => {
    const moved = () => setMoves((one) => one + 1);
    window.addEventListener('moved', moved);
    window.addEventListener('popstate', moved);
    return () => {
      window.removeEventListener('moved', moved);
      window.removeEventListener('popstate', moved);
    };
  }, []);
  useEffect(() => {
    // g and a letter go to a page, / to the search, as in many consoles.
    let isGoing = false;
    const letters = { r: 'training_runs', c: 'checkpoints', p: 'playground', s: 'sessions', a: 'samplers', h: 'server', u: 'usage', k: 'keys' };
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      if (isGoing && letters[event.key]) navigate(letters[event.key]);
      isGoing = event.key === 'g';
      if (event.key === '/') {
        const search = document.querySelector('input[type=search]');
        if (search) event.preventDefault();
        search?.focus();
      }
    };
    document.addEventListener('keydown', pressed);
    return () => document.removeEventListener('keydown', pressed);
  }, []);
  const current = place().parts[0] ?? 'training_runs';
  useEffect(() => {
    // On a phone, the pages are a row that is wider than the screen.
    const link = document.querySelector('.side-bar nav a[aria-current]');
    if (link) link.parentElement.scrollLeft = link.offsetLeft - (link.parentElement.clientWidth - link.offsetWidth) / 2;
  }, [current]);
  return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); event.stopPropagation(); document.getElementById('main').focus(); }}>Skip to the content</a>
    <aside class="side-bar">
      <a class="brand" href="training_runs"><img src="console/icon.svg" alt="" width="26" height="26" /> tinkex</a>
      <nav aria-label="Pages">${Object.entries(PAGES).map(([name, page]) => html`
        <a key=${name} href=${name} aria-current=${current === name ? 'page' : undefined}><${Icon} path=${page.icon} /> <span>${page.label}</span></a>`)}</nav>
      <div class="side-foot">
        <span class="live ${stream}" role="status">${{ live: 'Live', waiting: 'Connecting…', none: '' }[stream]}</span>
        <button class="quiet" onClick=${nextTheme} aria-label=${`Theme: ${theme}. Change it`}>◐ ${theme}</button>
        <a href="docs" target="_blank" rel="noopener">Routes</a>
        <span class="who"><bdi>${session.owner.slice(0, 40)}</bdi></span>
        ${session.needs_keys && html`<button class="quiet" onClick=${onSignOut}>Sign out</button>`}
      </div>
    </aside>
    <main id="main" tabindex="-1"><${Page} session=${session} /></main>`;
}

function App() {
  const [theme, nextTheme] = useTheme();
  const [session, setSession] = useState(null);
  const [reason, setReason] = useState(null);
  const [error, setError] = useState(null);
  const check = () => api('api/v1/console/session').then(
    (found) => { setSession(found); setReason(null); setError(null); },
    (failure) => { if (failure.status !== 401) setError(failure); },
  );
  useEffect(() => {
    const ended = (event) => setSession((old) => {
      // At the first load nobody was signed in, and nothing has to be explained.
      if (old?.owner) setReason(event.detail);
      return { signedOut: true };
    });
    window.addEventListener('signed-out', ended);
    check();
    return () => window.removeEventListener('signed-out', ended);
  }, []);
  const signOut = async () => {
    try {
      await api('api/v1/console/sign_out', { method: 'POST' });
    } catch (failure) {
      if (failure.status !== 401) return setError(new Error(`You are still signed in. ${failure.message}`));
    }
    return setSession({ signedOut: true });
  };
  if (error) return html`<main class="sign-in"><div class="card"><h1>tinkex</h1><${Problem} error=${error} /><button onClick=${check}>Try again</button></div></main>`;
  if (!session) return html`<p class="muted pad" role="status">Loading…</p>`;
  if (session.signedOut) return html`<${SignIn} onSignedIn=${check} reason=${reason} />`;
  return html`<${Shell} session=${session} onSignOut=${signOut} theme=${theme} nextTheme=${nextTheme} />`;
}

// Links of earlier clients have the page after a number sign.
if (location.hash.startsWith('#/')) navigate(location.hash.slice(2), { replace: true });
followLinks();
const root = document.getElementById('app');
root.replaceChildren();
render(html`<${App} />`, root);
