#!/usr/bin/env bash
# Build a Dockerfile and test the image, on a Debian machine that has neither a Docker engine nor
# an image registry to pull from.
#
#   build_image.sh CONTEXT DOCKERFILE TAG COMMAND [ARG...]       as root
#
# COMMAND runs when the image is built, with IMAGE set to TAG, and with CONTAINERS_STORAGE_CONF and
# BUILDAH_ISOLATION set so that `buildah from`, `run` and `inspect` find it. The script exits with its
# status. BUILD_IMAGE_MOUNTS has the mounts for this machine's package registries: SOURCE:TARGET:ro,
# one per line.
#
# Each base image in a FROM line is replaced by a stand-in, which is made here once and cached:
#   debian:SUITE[-slim]               debootstrap (minbase) plus the official image's apt and dpkg settings
#   python:X.Y[-slim][-SUITE]         the above plus Debian's own python3, if that is version X.Y
#   amd64/debian:..., arm64v8/debian:...  the first one for that processor; qemu runs its programs here
# How this machine reaches its package registries (apt settings, pip settings, CA certificates,
# proxy variables) is mounted into the RUN steps only, so the Dockerfile does not mention it.
# The images are for testing; never push one: an image that installs ca-certificates contains this
# machine's certificates.
#
# Layers are kept in the store, so the next build makes only what has changed.
#
# Environment, all optional:
#   BUILD_IMAGE_CACHE      where images are stored (default: build_image in the user's cache folder);
#                          to delete them all, remove that folder
#   BUILD_IMAGE_FRESH=1    make the stand-ins again
#   BUILD_IMAGE_STANDINS=1 make only the stand-ins; COMMAND builds the image
#   BUILD_IMAGE_ISOLATION  chroot (default), or oci where an OCI runtime works
#   BUILD_IMAGE_FLAGS      more flags for buildah build, quoted as for a shell, such as --build-arg X='Y Z'
#   DEBIAN_MIRROR          mirror for debootstrap (default: the one in this machine's apt sources)
set -euo pipefail

say() { printf '[build_image %4ss] %s\n' "$SECONDS" "$*" >&2; }
die() { say "error: $*"; exit 1; }

[ $# -ge 4 ] || { sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; }
context=$1 dockerfile=$2 tag=$3; shift 3
[ "$(id -u)" = 0 ] || die "must run as root"
[ -d "$context" ] || die "no such folder: $context"
[ -f "$dockerfile" ] || die "no such file: $dockerfile"

cache=${BUILD_IMAGE_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/build_image}
isolation=${BUILD_IMAGE_ISOLATION:-chroot}
inside=/run/build-access                     # where a RUN step sees the access settings
mkdir -p "$cache"
exec 9>"$cache/lock"; flock 9                # one build at a time per cache
work=$(mktemp -d); mkdir "$work/empty"       # mode 700
containers=()

cleanup() {
  local rc=$? c m
  for c in ${containers[@]+"${containers[@]}"}; do
    m=$(buildah mount 2>/dev/null | awk -v c="$c" '$1 == c { print $2 }') || true
    [ -z "$m" ] || umount "$m/proc" "$m/sys" 2>/dev/null || true   # left by a debootstrap that failed
    buildah rm "$c" >/dev/null 2>&1 || true
  done
  rm -rf "$work"
  exit "$rc"
}
trap cleanup EXIT

# ---- tools -------------------------------------------------------------------------------------
apt_updated=0
apt_update() { [ $apt_updated = 1 ] || apt-get update -qq; apt_updated=1; }

missing=()
for tool in buildah debootstrap; do command -v $tool >/dev/null || missing+=("$tool"); done
if [ ${#missing[@]} -gt 0 ]; then
  say "installing ${missing[*]}"
  apt_update
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
    >"$work/apt.log" 2>&1 || { cat "$work/apt.log" >&2; die "apt-get install failed"; }
fi

# ---- image store: overlay where the kernel and file system allow it, else vfs (slower, bigger) --
# mounts that a killed run left
awk -v d="$(cd "$cache" && pwd -P)/" 'index($5, d) == 1 { print $5 }' /proc/self/mountinfo | sort -r |
  while read -r m; do umount -l "$m" || true; done
export CONTAINERS_STORAGE_CONF=$work/storage.conf
for driver in overlay vfs; do
  printf '[storage]\ndriver = "%s"\ngraphroot = "%s"\nrunroot = "%s"\n' \
    $driver "$cache/$driver" "$work/run" >"$CONTAINERS_STORAGE_CONF"
  if c=$(buildah from scratch 2>"$work/err") && buildah mount "$c" >/dev/null 2>>"$work/err"; then
    buildah rm --all >/dev/null; break       # this one, and what a killed run left
  fi
  [ $driver = overlay ] || die "no storage driver works: $(tail -1 "$work/err")"
done

# ---- this machine's access to package registries ------------------------------------------------
access=$work/access; mkdir -p "$access"
mounts=(-v "$access:$inside:ro")
for f in "${PIP_CERT:-}" "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt; do
  if [ -s "$f" ]; then cp -L "$f" "$access/ca.crt"; break; fi
done
# certificates of this machine: an image that installs ca-certificates contains them
if compgen -G '/usr/local/share/ca-certificates/*.crt' >/dev/null; then
  mounts+=(-v /usr/local/share/ca-certificates:/usr/local/share/ca-certificates:ro)
fi
# apt: settings without which the sources cannot be read
apt-config dump | grep -E '^Acquire::(Check-Valid-Until|Check-Date|Retries|https?::(Proxy|Timeout)) ' \
  >"$access/apt.conf" || true
[ ! -s "$access/ca.crt" ] || echo "Acquire::https::CAInfo \"$inside/ca.crt\";" >>"$access/apt.conf"
mounts+=(-v "$access/apt.conf:/etc/apt/apt.conf.d/zz-build-access:ro")
# pip: the index; a local folder or file:// index is mounted too
declare -A pip_set=()
while IFS='=' read -r key value; do
  case $key in global.*|:env:.*) ;; *) continue ;; esac
  key=${key#global.}; key=${key#:env:.}
  case $key in
    index-url|extra-index-url|find-links|no-index|trusted-host|proxy|timeout|default-timeout|retries)
      value=${value#[\'\"]}; value=${value%[\'\"]}; pip_set[$key]=${value//\\n/ } ;;
  esac
done < <({ pip config list || true; } 2>/dev/null | sort -r)          # :env: last, so that it wins
{
  echo '[global]'
  [ ! -s "$access/ca.crt" ] || echo "cert = $inside/ca.crt"
  n=0
  for key in ${pip_set[@]+"${!pip_set[@]}"}; do
    words=()
    for word in ${pip_set[$key]}; do
      path=${word#file://}
      if [[ $path = /* && -e $path ]]; then
        n=$((n + 1)); sub=
        # an index keeps its files beside it: mount the folder above
        if [[ $key = *index-url ]]; then path=${path%/}; sub=/${path##*/}; path=${path%/*}; fi
        mkdir -p "$access/local/$n"
        mounts+=(-v "$path:$inside/local/$n:ro")
        if [[ $word = file://* ]]; then word=file://$inside/local/$n$sub; else word=$inside/local/$n$sub; fi
      fi
      words+=("$word")
    done
    echo "$key = ${words[*]}"
  done
} >"$access/pip.conf"
mounts+=(-v "$access/pip.conf:/etc/pip.conf:ro")

build() {  # build TAG DOCKERFILE CONTEXT [FLAG...]
  local t=$1 f=$2 d=$3; shift 3
  buildah build --isolation "$isolation" --network host --pull-never --format docker \
    "${mounts[@]}" "$@" -t "$t" -f "$f" "$d"
}

# ---- stand-ins for base images ------------------------------------------------------------------
declare -A made=()                           # in this run
have() {
  [ "${BUILD_IMAGE_FRESH:-0}" != 1 ] || [ -n "${made[$1]:-}" ] || return 1
  [ -n "$(buildah images -q "$1" 2>/dev/null)" ]
}

emulate_arm64() {  # the kernel starts its programs with qemu, also inside of a container
  local kinds=/proc/sys/fs/binfmt_misc emulator bytes='\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00'
  [ "$here" != arm64 ] || return 0
  emulator=$(command -v qemu-aarch64-static) || die "apt install qemu-user-static"
  [ -e $kinds/register ] || mount -t binfmt_misc binfmt_misc $kinds || die "no emulation: binfmt_misc is not there"
  [ -e $kinds/qemu-aarch64 ] || printf '%s' ":qemu-aarch64:M::\x7fELF$bytes\x02\x00\xb7\x00:\xff\xff\xff\xff\xff" \
    "\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:$emulator:F" >$kinds/register
}

make_debian() {  # make_debian SUITE [ARCHITECTURE]
  local suite=$1 arch=${2:-$here} host mirror c root uri release component
  local name=localhost/standin-debian:$1${2:+-$2}
  if have "$name"; then return; fi
  say "making a stand-in for debian:$suite-slim${2:+ on $2}"
  apt_update
  host=$(. /etc/os-release; echo "${VERSION_CODENAME:-}")
  apt-get indextargets --format '$(ORIGIN) $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    sed -n 's/^Debian //p' | sort -u >"$work/sources"
  mirror=${DEBIAN_MIRROR:-$(awk -v r="$host" '$2 == r { print $1; exit }' "$work/sources")}
  [ -n "$mirror" ] || die "no Debian mirror in this machine's apt sources; set DEBIAN_MIRROR"
  c=$(buildah from scratch); containers+=("$c")
  root=$(buildah mount "$c")                 # not buildah add: that would make root own every file
  debootstrap --arch="$arch" --variant=minbase "$suite" "$root" "$mirror" >"$work/debootstrap.log" 2>&1 ||
    { tail -20 "$work/debootstrap.log" "$root/debootstrap/debootstrap.log" >&2; die "debootstrap failed"; }
  # the apt and dpkg settings of the official image
  : >"$root/etc/apt/sources.list"
  while read -r uri release component; do
    case $release in "$host"|"$host"-*) ;; *) continue ;; esac
    printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: %s\nSigned-By: %s\n\n' "$uri" \
      "$suite${release#"$host"}" "$component" /usr/share/keyrings/debian-archive-keyring.gpg
  done <"$work/sources" >"$root/etc/apt/sources.list.d/debian.sources"
  printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"; chmod 755 "$root/usr/sbin/policy-rc.d"
  echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/docker-apt-speedup"
  printf 'path-exclude /usr/share/%s/*\n' doc groff info linda lintian locale man \
    >"$root/etc/dpkg/dpkg.cfg.d/docker"
  printf 'path-include /usr/share/%s\n' 'doc/*/copyright' locale/locale.alias >>"$root/etc/dpkg/dpkg.cfg.d/docker"
  cat >"$root/etc/apt/apt.conf.d/docker-clean" <<'E'
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/archives/partial/*.deb /var/cache/apt/*.bin || true"; };
APT::Update::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/archives/partial/*.deb /var/cache/apt/*.bin || true"; };
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Acquire::Languages "none";
Acquire::GzipIndexes "true";
APT::AutoRemove::SuggestsImportant "false";
E
  find "$root/usr/share/doc" ! -type d ! -name copyright -delete
  find "$root/usr/share/doc" -type d -empty -delete
  rm -rf "$root"/usr/share/{groff,info,linda,lintian,man}/* "$root"/var/lib/apt/lists/* \
    "$root"/var/cache/apt/archives/*.deb "$root"/var/cache/apt/*.bin "$root"/var/log/{bootstrap,dpkg}.log
  find "$root/usr/share/locale" -mindepth 1 ! -name locale.alias -delete 2>/dev/null || true
  : >"$root/etc/machine-id"; : >"$root/etc/resolv.conf"; : >"$root/etc/hostname"
  buildah umount "$c" >/dev/null
  buildah config --arch "$arch" --cmd bash --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$c"
  buildah commit -q --rm --format docker "$c" "$name" >/dev/null
  made[$name]=1
}

make_python() {  # make_python X.Y SUITE
  local name=localhost/standin-python:$1-$2
  if have "$name"; then return; fi
  make_debian "$2"
  say "making a stand-in for python:$1-slim-$2"
  cat >"$work/Dockerfile.python" <<E
FROM localhost/standin-debian:$2
RUN apt-get update && apt-get install -y --no-install-recommends \\
      ca-certificates python3 python3-dev python3-pip python3-venv && rm -rf /var/lib/apt/lists/*
RUN test "\$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = $1 || \\
      { echo "python3 of $2 is \$(python3 -V), not $1" >&2; exit 1; }; \\
    rm -f /usr/lib/python3*/EXTERNALLY-MANAGED; mkdir -p /usr/local/lib/python$1/dist-packages; \\
    ln -s dist-packages /usr/local/lib/python$1/site-packages; \\
    for n in python python3 python$1; do ln -s /usr/bin/python3 /usr/local/bin/\$n; done
ENV LANG=C.UTF-8
CMD ["python3"]
E
  build "$name" "$work/Dockerfile.python" "$work/empty" >"$work/python.log" 2>&1 ||
    { tail -20 "$work/python.log" >&2; die "no stand-in for python:$1 on $2"; }
  made[$name]=1
}

from_images() {  # images named in FROM lines, with ARGs filled in; no stages, no scratch
  awk -v flags="${BUILD_IMAGE_FLAGS:-}" '
    BEGIN {
      n = split(flags, word, " ")
      for (i = 1; i < n; i++) if (word[i] == "--build-arg") {
        at = index(word[i + 1], "="); given[substr(word[i + 1], 1, at - 1)] = substr(word[i + 1], at + 1) } }
    { sub(/\r$/, "") }
    toupper($1) == "ARG" && !from && (i = index($2, "=")) {
      v = substr($2, i + 1); gsub(/["\047]/, "", v)
      k = substr($2, 1, i - 1); arg[k] = k in given ? given[k] : v }
    toupper($1) == "FROM" {
      from = 1; i = 2; while ($i ~ /^--/) i++
      image = $i
      for (a in arg) { gsub("[$][{]" a "(:-[^}]*)?[}]", arg[a], image); gsub("[$]" a, arg[a], image) }
      if (!(tolower(image) in stage) && image != "scratch") print image
      if (toupper($(i + 1)) == "AS") stage[tolower($(i + 2))] = 1 }' "$1" | sort -u
}

here=$(dpkg --print-architecture)
suite_here=$(. /etc/os-release; echo "${VERSION_CODENAME:-}")
[ "${BUILD_IMAGE_FRESH:-0}" != 1 ] || buildah rmi --prune >/dev/null 2>&1 || true   # replaced stand-ins
mapfile -t images < <(from_images "$dockerfile")
for image in ${images[@]+"${images[@]}"}; do
  short=${image##*/}                         # other registry and library prefixes do not matter here
  case $image in amd64/*) arch=amd64 ;; arm64v8/*) arch=arm64; emulate_arm64 ;; *) arch= ;; esac
  case $short in
    *@sha256:*) die "$image: a digest cannot be met by a stand-in" ;;
    debian:*)
      suite=${short#debian:}; suite=${suite%-slim}
      make_debian "$suite" $arch; standin=localhost/standin-debian:$suite${arch:+-$arch} ;;
    python:[0-9]*)
      rest=${short#python:}; version=${rest%%-*}; rest=${rest#"$version"}; rest=${rest#-slim}; suite=${rest#-}
      make_python "$version" "${suite:-$suite_here}"; standin=localhost/standin-python:$version-${suite:-$suite_here} ;;
    *) die "no stand-in known for: FROM $image" ;;
  esac
  buildah tag "$standin" "$image"
done

# ---- build, then test it ------------------------------------------------------------------------
if [ "${BUILD_IMAGE_STANDINS:-0}" != 1 ]; then
  say "building $tag ($driver, $isolation)"
  eval "flags=(${BUILD_IMAGE_FLAGS:-})"
  build "$tag" "$dockerfile" "$context" --layers ${flags[@]+"${flags[@]}"} >&2 || die "the build failed"
  say "built $tag: $(buildah images --format '{{.Size}}' "$tag" | head -1)"
fi

BUILD_IMAGE_MOUNTS=$(printf '%s\n' "${mounts[@]}" | grep -vx -e -v)
export BUILD_IMAGE_MOUNTS BUILD_IMAGE_CACHE=$cache
rc=0; IMAGE=$tag BUILDAH_ISOLATION=$isolation "$@" </dev/null || rc=$?
say "exit status $rc"
exit $rc
