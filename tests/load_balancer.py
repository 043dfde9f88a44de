"""nginx in front of several web processes."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from ports import free_port

NGINX = """
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_max_body_size 100m;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream web {{ {servers} }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://web;
            proxy_http_version 1.1;
            proxy_set_header Host $host;
            proxy_buffering off;
            proxy_read_timeout 120s;
        }}
    }}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, urls: Sequence[str]) -> Iterator[str]:
    """Round robin over these web processes; the URL for clients."""
    found = shutil.which("nginx", path="/usr/sbin:" + os.environ.get("PATH", ""))
    assert found, "nginx is not installed (Debian: apt install nginx-light)"
    port = free_port()
    servers = " ".join(f"server {url.removeprefix('http://')} max_fails=0;" for url in urls)
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, servers=servers, port=port))
    process = subprocess.Popen([found, "-c", str(config), "-g", "daemon off;"])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGQUIT)
        process.wait(20)
