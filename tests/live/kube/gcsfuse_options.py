"""What a volume's ``mountOptions`` mean: which are flags, which go into gcsfuse's config file, and who wins.

From gcsfuse's cfg/params.yaml (7b39292, August 2026) and the CSI driver's sidecar_mounter_config.go and
csi_driver/utils.go (5fcdc04): ``a-b=v`` and a bare word are flags, ``a:b:v`` is a line of the config file, attributes
of the volume become config lines too. A machine of the high-performance group or a profile sets other defaults than
the table's. An explicit option wins over them; but gcsfuse 3.4.0 to 3.5.6 asked only whether the *flag* was given, and
ignored the config file there. An option that no version knows keeps the pod from starting. Options that the driver
keeps for itself are left out without a word to the pod (the reference says refused; the code says discarded).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

#: The machine types whose defaults differ (machine-type-groups); TPUs left out.
HIGH_PERFORMANCE = {
    "a2-megagpu-16g", "a2-ultragpu-8g", "a3-edgegpu-8g", "a3-highgpu-8g", "a3-megagpu-8g", "a3-ultragpu-8g",
    "a4-highgpu-8g", "a4-highgpu-8g-lowmem", "a4-highgpu-8g-nolssd", "a4x-highgpu-4g", "a4x-highgpu-4g-nolssd",
    "a4x-maxgpu-4g-metal",
}  # fmt: skip
#: Config key -> value there.
ON_HIGH_PERFORMANCE = {
    "implicit-dirs": "true", "file-system:rename-dir-limit": "200000", "metadata-cache:negative-ttl-secs": "0",
    "metadata-cache:ttl-secs": "-1", "metadata-cache:stat-cache-max-size-mb": "1024",
    "write:global-max-blocks": "1600",
}  # fmt: skip
_ALL_PROFILES = {
    "implicit-dirs": "true", "metadata-cache:negative-ttl-secs": "0", "metadata-cache:ttl-secs": "-1",
    "metadata-cache:stat-cache-max-size-mb": "-1",
}  # fmt: skip
PROFILES = {
    "aiml-training": _ALL_PROFILES,
    "aiml-serving": _ALL_PROFILES | {"file-system:kernel-list-cache-ttl-secs": "-1"},
    "aiml-checkpointing": _ALL_PROFILES | {"file-system:rename-dir-limit": "200000"},
}
#: Known, and without effect on what is played here: flag -> config key.
INERT = {
    "file-cache-max-size-mb": "file-cache:max-size-mb",
    "file-cache-cache-file-for-range-read": "file-cache:cache-file-for-range-read",
    "file-cache-enable-parallel-downloads": "file-cache:enable-parallel-downloads",
    "type-cache-max-size-mb": "metadata-cache:type-cache-max-size-mb",
    "write-block-size-mb": "write:block-size-mb",
    "write-max-blocks-per-file": "write:max-blocks-per-file",
    "log-severity": "logging:severity",
    "client-protocol": "gcs-connection:client-protocol",
    "max-conns-per-host": "gcs-connection:max-conns-per-host",
    "sequential-read-size-mb": "gcs-connection:sequential-read-size-mb",
    "ignore-interrupts": "file-system:ignore-interrupts",
    "enable-buffered-read": "read:enable-buffered-read",
    "app-name": "app-name",
    "machine-type": "machine-type",
    "disable-autoconfig": "disable-autoconfig",
    "enable-hns": "enable-hns",
    "enable-metadata-prefetch": "metadata-cache:enable-metadata-prefetch",
    "profile": "profile",
}
#: The driver's own: to the kernel, or to the node.
OF_THE_DRIVER = {"ro", "rw", "read_ahead_kb", "max_ratio", "skip-csi-bucket-access-check"}
KEPT_BACK = {
    "log-file", "log-format", "o", "cache-dir", "temp-dir", "config-file", "foreground", "key-file", "token-url",
    "reuse-token-from-url", "prometheus-port", "kernel-params-file", "file-system:kernel-params-file",
}  # fmt: skip
ATTRIBUTES = {
    "fileCacheCapacity": "file-cache:max-size-mb",
    "fileCacheForRangeRead": "file-cache:cache-file-for-range-read",
    "metadataStatCacheCapacity": "metadata-cache:stat-cache-max-size-mb",
    "metadataTypeCacheCapacity": "metadata-cache:type-cache-max-size-mb",
    "metadataCacheTTLSeconds": "metadata-cache:ttl-secs",
    "metadataCacheTtlSeconds": "metadata-cache:ttl-secs",
    "gcsfuseLoggingSeverity": "logging:severity",
}
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class BadOption(ValueError):
    """As the driver reports it: gcsfuse did not start."""


@dataclass(frozen=True)
class Settings:
    """Of one mount. The defaults are those of any machine."""

    file_mode: int = 0o644
    dir_mode: int = 0o755
    uid: int = 0
    gid: int = 0
    implicit_dirs: bool = False
    rename_dir_limit: int = 0
    metadata_cache_ttl_secs: int = 60
    metadata_cache_negative_ttl_secs: int = 5
    stat_cache_max_size_mb: int = 34
    kernel_list_cache_ttl_secs: int = 0
    enable_streaming_writes: bool = True
    write_global_max_blocks: int = 4
    create_empty_file: bool = False
    enable_atomic_rename_object: bool = True
    strong_consistency_on_open: bool = False
    chunk_retry_deadline_secs: int = 120
    only_dir: str = ""
    read_only: bool = False

    @property
    def ttl_s(self) -> float:
        """Of names in the mount's own cache; a capacity of 0 is none."""
        return self.metadata_cache_ttl_secs if self.stat_cache_max_size_mb else 0


#: Flag -> config key, of what is played.
PLAYED = {
    "file-mode": "file-system:file-mode",
    "dir-mode": "file-system:dir-mode",
    "uid": "file-system:uid",
    "gid": "file-system:gid",
    "implicit-dirs": "implicit-dirs",
    "rename-dir-limit": "file-system:rename-dir-limit",
    "metadata-cache-ttl-secs": "metadata-cache:ttl-secs",
    "metadata-cache-negative-ttl-secs": "metadata-cache:negative-ttl-secs",
    "stat-cache-max-size-mb": "metadata-cache:stat-cache-max-size-mb",
    "kernel-list-cache-ttl-secs": "file-system:kernel-list-cache-ttl-secs",
    "enable-streaming-writes": "write:enable-streaming-writes",
    "write-global-max-blocks": "write:global-max-blocks",
    "create-empty-file": "write:create-empty-file",
    "enable-atomic-rename-object": "enable-atomic-rename-object",
    "strong-consistency-on-open": "file-system:strong-consistency-on-open",
    "chunk-retry-deadline-secs": "gcs-retries:chunk-retry-deadline-secs",
    "only-dir": "only-dir",
}
FLAGS = PLAYED | INERT
KEYS = {key: flag for flag, key in FLAGS.items()}


def settings(
    options: Sequence[str], attributes: Mapping[str, str] | None = None, *, machine: str = "", version: str = "3.11.2"
) -> Settings:
    """Of a volume's mount options and attributes on a machine of that type. Raises BadOption."""
    flags, config = told(options, attributes or {})
    profile = flags.get("profile") or config.get("profile") or ""
    if profile and profile not in PROFILES:
        raise BadOption(f"invalid value for profile: {profile!r}")
    tuned = ON_HIGH_PERFORMANCE if machine in HIGH_PERFORMANCE else {}
    tuned = tuned | PROFILES.get(profile, {})
    values = {**config, **{FLAGS[flag]: value for flag, value in flags.items() if flag in FLAGS}}
    deaf = (3, 4, 0) <= tuple(int(part) for part in version.split(".")) <= (3, 5, 6)
    for key, value in tuned.items():
        if key not in values or (deaf and KEYS[key] not in flags):
            values[key] = value
    kinds = {field.name: field.type for field in fields(Settings)}
    given = {}
    for flag, key in PLAYED.items():
        if key in values:
            name = flag.replace("-", "_")
            given[name] = _value(flag, values[key], kinds[name])
    # Each value is of its field's own kind.
    return Settings(**given, read_only="ro" in flags)  # type: ignore[arg-type]


def told(options: Sequence[str], attributes: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(flags, config file) as the sidecar passes them to gcsfuse. Raises BadOption."""
    flags: dict[str, str] = {}
    config: dict[str, str] = {}
    for option in options:
        if "=" not in option and ":" in option and "https" not in option:
            key, _, value = option.rpartition(":")
            if key in KEPT_BACK:
                continue
            if key not in KEYS:
                raise BadOption(f"error decoding config file: has invalid keys: {key}")
            config[key] = value
        elif option:
            flag, _, value = option.partition("=")
            if flag in KEPT_BACK:
                continue
            if flag not in FLAGS and flag not in OF_THE_DRIVER:
                raise BadOption(f"unknown flag: --{flag}")
            flags[flag] = value
    for name, value in attributes.items():
        if name in ATTRIBUTES:
            config[ATTRIBUTES[name]] = _megabytes(value) if name.endswith("Capacity") else value
    return flags, config


def of_volume(csi: Mapping[str, object], *, fs_group: int | None = None) -> tuple[list[str], dict[str, str], str]:
    """(mount options, attributes, bucket) of a pod's ``csi`` volume. The group of the pod comes first: options win."""
    told = csi.get("volumeAttributes")
    attributes = {str(key): str(value) for key, value in told.items()} if isinstance(told, dict) else {}
    options = [] if fs_group is None else [f"gid={fs_group}", "file-mode=664", "dir-mode=775"]
    options += ["ro"] if csi.get("readOnly") else []
    options += [one for one in attributes.get("mountOptions", "").split(",") if one]
    return options, attributes, attributes["bucketName"]


def _value(flag: str, text: str, kind: object) -> int | bool | str:
    try:
        if kind in (bool, "bool"):
            return {"": True, "true": True, "false": False}[text.lower()]
        if kind in (str, "str"):
            return text
        return int(text, 8) if flag.endswith("-mode") else int(text)
    except (KeyError, ValueError) as error:
        raise BadOption(f'invalid argument "{text}" for "--{flag}" flag') from error


def _megabytes(quantity: str) -> str:
    found = re.fullmatch(r"(-?\d+)([kMG]i?|)", quantity)
    if found is None:
        raise BadOption(f"volume attribute only accepts a valid Quantity value, got {quantity!r}")
    size = int(found[1]) * UNITS[found[2]]
    return "-1" if size < 0 else str(size // (2**20 if found[2].endswith("i") else 10**6))
