"""What is wrong with a field of a request or a setting, worded from the error that pydantic makes of it.

Errors as pydantic lists them enter, words leave. Values are not repeated: they may be long, or secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What is wrong, by the type of pydantic's error; in braces what its context says.
_WORDS = {
    "missing": "is missing",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "must be a smaller integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have {min_length} or more entries, has {actual_length}",
    "too_long": "must have at most {max_length} entries, has {actual_length}",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match the regular expression {pattern}",
    "extra_forbidden": "is no field",
    "value_error": "{error}",
} | dict.fromkeys(("model_type", "model_attributes_type", "dict_type", "dict_attributes_type"), "must be an object")


def describe_field_error(error: Mapping[str, Any]) -> str:
    """Return what is wrong, without the field's name; of an error of a type that is not known here pydantic's own words."""
    words = _WORDS.get(str(error.get("type")))
    if words is None:
        return str(error["msg"])
    context = {"actual_length": "more"} | {name: "more" if value is None else value for name, value in (error.get("ctx") or {}).items()}
    return words.format_map(context)
