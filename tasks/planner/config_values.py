"""Checked reading of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.errors import UserError


class ConfigValues:
    """A config or one section of it; errors name the key as the file spells it."""

    def __init__(self, values: Mapping[str, object], section: str = "") -> None:
        self._values = values
        self._prefix = f"{section}." if section else ""

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> object:
        return self._values.get(key)

    def name(self, key: str) -> str:
        return f"{self._prefix}{key}"

    def size(self, keys: str | Sequence[str], default: int, null: int | None = None) -> int:
        """A whole number of at least 1 under the first of `keys` that is there.

        Left out it is `default`; written as null it is `null`, or `default` where that is None.

        Raises:
            UserError: the value is no such number.
        """
        for key in (keys,) if isinstance(keys, str) else keys:
            if key in self._values:
                value = self._values[key]
                if value is None:
                    return default if null is None else null
                return self._whole(key, value, 1)
        return default

    def count(self, key: str, default: int) -> int:
        """A whole number of at least 0; `default` where it is left out or null."""
        value = self._values.get(key)
        return default if value is None else self._whole(key, value, 0)

    def flag(self, key: str, default: bool = False) -> bool:
        return self._values.get(key, default) is True

    def section(self, key: str) -> ConfigValues:
        """A nested config; an empty one where it is left out or null.

        Raises:
            UserError: the value is no mapping.
        """
        value = self._values.get(key)
        if value is None:
            return ConfigValues({}, self.name(key))
        if not isinstance(value, Mapping):
            raise UserError(
                f"config.json: {self.name(key)}={value!r} must be a mapping of keys to values; "
                "mend the model's config"
            )
        return ConfigValues(value, self.name(key))

    def changed(self, **values: object) -> ConfigValues:
        """A copy with other values under the same name."""
        copy = ConfigValues({**self._values, **values})
        copy._prefix = self._prefix
        return copy

    def _whole(self, key: str, value: object, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(
                f"config.json: {self.name(key)}={value!r} must be a whole number of at least {least}; "
                "mend the model's config"
            )
        return value
