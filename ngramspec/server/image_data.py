"""Dropping the data of images and other media from a body of JSON: no route reads it, and it would take most of what a body may have.

Bytes of JSON, whole or as far as they have come, enter and leave. One pass over them, whatever they are; what is no image stays as it is.
"""

from __future__ import annotations

import re

_KEPT = rb"[A-Za-z0-9+/=_\\-]{1023}[A-Za-z0-9+/=_-]"  # of the base64, so that what has lost the rest is still no text; ends in no escape
_REST = rb"(?:[A-Za-z0-9+/=_-]++|\\[/nr])++"  # with the escapes of PHP's JSON, and of base64 in lines
_BEGIN = rb'\s*+"(?:data:[\w.+/\\-]{1,100};base64,)?+'
_LONG = re.compile(rb"(%b%b)%b" % (_BEGIN, _KEPT, _REST))
# OpenAI's and Anthropic's images, audio and files: one text.
_ONE = re.compile(rb'("(?:url|image_url|data|file_data)"\s*+:%b%b)%b' % (_BEGIN, _KEPT, _REST))
# Ollama's: a list, from its begin to its end, or to the first that is no base64. One at least is long.
_SEVERAL = re.compile(
    rb'"images"\s*+:\s*+\[(?:%b[A-Za-z0-9+/=_\\-]{0,1024}+"\s*+,)*+%b%b(?:%b)?+(?:"\s*+,%b(?:%b)?+)*+'
    % (_BEGIN, _BEGIN, _KEPT, _REST, _BEGIN, _REST)
)


def drop_image_data(body: bytes | bytearray) -> bytearray:
    """Return the body with the first 1,024 characters of the base64 of each image. What comes after an unfinished one may be appended."""
    return bytearray(_SEVERAL.sub(lambda found: _LONG.sub(rb"\1", found[0]), _ONE.sub(rb"\1", body)))
