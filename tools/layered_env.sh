#!/bin/sh
# Makes a virtual environment FOLDER that sees everything in .venv, and PACKAGEs on top of it that .venv must never hold.
# Usage: [BENEATH=.venv] tools/layered_env.sh FOLDER PACKAGE==VERSION...
set -eu
cd "$(dirname "$0")/.."
folder=$1
under=${BENEATH:-.venv}
shift
stamp="$folder/.installed-$(echo "$*" | tr -c 'a-zA-Z0-9.\n' '_')"
[ -e "$stamp" ] && [ ! "$under/.installed" -nt "$stamp" ] && exit 0

rm -rf "$folder"
"$under/bin/python" -m venv "$folder"
inside=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
beneath=$("$under/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$beneath')" > "$inside/beneath.pth"
# --no-deps: what the packages need is beneath already; their own wishes would replace torch by a CUDA build.
"$folder/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps "$@"
touch "$stamp"
