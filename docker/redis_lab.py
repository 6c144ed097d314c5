"""What the lab's Redis needs beside its server: `secrets` draws a password once, into files; `ping` asks whether it answers.

Runs in the image `redis`, with nothing but Python: `secrets` as a service that ends, `ping` as the health check.
"""

import os
import secrets
import socket
import sys
from pathlib import Path

FOLDER = Path("/run/secrets")
URL, CONFIG = FOLDER / "redis_url", FOLDER / "redis.conf"
TIMEOUT_S = 2.0


def draw() -> int:
    """Write the password where server and clients look for it, unless it is there."""
    if not URL.exists():
        os.umask(0o277)
        password = secrets.token_hex(24)
        CONFIG.unlink(missing_ok=True)
        CONFIG.write_text(f"requirepass {password}\n", encoding="utf-8")
        # Last, so that there never is an address without its password.
        URL.write_text(f"redis://:{password}@redis:6379/0", encoding="utf-8")
    return 0


def ping() -> int:
    password = URL.read_text(encoding="utf-8").split("@")[0].rpartition(":")[2]
    with socket.create_connection(("127.0.0.1", 6379), TIMEOUT_S) as connection:
        connection.sendall(f"AUTH {password}\r\nPING\r\n".encode())
        answer = b""
        while not answer.endswith(b"+PONG\r\n"):
            chunk = connection.recv(256)
            if not chunk or b"-" in chunk:
                return 1
            answer += chunk
    return 0


if __name__ == "__main__":
    sys.exit({"secrets": draw, "ping": ping}[sys.argv[1]]())
