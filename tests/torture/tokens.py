"""Blocks of generated networks over tokens: attention as people write it, perceptrons, streams that something else begins."""

from __future__ import annotations

from .writing import NotFitting, Writer

NORMS = ("LayerNorm({c})", "LayerNorm({c}, bias=False)", "LayerNorm({c}, elementwise_affine=False)", "RMSNorm({c})")
ACTIVATIONS = ("F.relu", "F.gelu", "F.silu", "torch.tanh")


def tokens(w: Writer) -> str:
    """The pixels of an image as tokens, or features that are there."""
    v = w.value(3) if w.chance(0.2) else w.image()
    return v if len(w.shape(v)) == 3 and w.chance(0.5) else w.let(f"{v}.flatten(2).transpose(1, 2)")


def linear_of(w: Writer, out: int, t: str) -> str:
    """A linear layer for the last axis of `t`, not yet called."""
    return w.part(f"nn.Linear({w.shape(t)[-1]}, {out}, bias={w.chance(0.6)})")


def norm_of(w: Writer, c: int) -> str:
    return w.part(f"nn.{w.pick(NORMS).format(c=c)}")


# ---- perceptrons -------------------------------------------------------------------------------------------------------


def perceptron(w: Writer, t: str, out: int) -> str:
    """On the last axis: two layers with an activation, a gate or a norm of global responses between them."""
    n, kind, act = w.channels(), w.draw.randrange(5), w.pick(ACTIVATIONS)
    if kind == 0:
        y = w.let(f"{act}({linear_of(w, n, t)}({t})) * {linear_of(w, n, t)}({t})", read=False)
    elif kind == 1:
        both = w.let(f"{linear_of(w, 2 * n, t)}({t}).chunk(2, {w.pick(('-1', 'dim=-1'))})", read=False)
        y = w.let(f"{act}({both}[0]) * {both}[1]", read=False)
    else:
        y = w.let(f"{act}({linear_of(w, n, t)}({t}))", read=False)
        y = global_response_norm(w, y) if kind == 2 else y
    return w.let(f"{linear_of(w, out, y)}({y})", read=False)


def global_response_norm(w: Writer, y: str) -> str:
    """Features weighed by the norm that each has over the places, beside the mean of these norms."""
    c, places = w.shape(y)[-1], tuple(range(1, len(w.shape(y)) - 1))
    g = w.let(w.pick((f"{y}.norm(p=2, dim={places}, keepdim=True)", f"torch.norm({y}, 2, {places}, True)")), read=False)
    weighed = f"{y} * ({g} / ({g}.mean(-1, keepdim=True) + 0.01))"
    return w.let(w.pick((f"{w.parameter(c)} * ({weighed}) + {w.parameter(c)} + {y}", f"{weighed} + {y}")), read=False)


def convnext(w: Writer) -> None:
    """A depthwise convolution, a norm and a perceptron at every pixel, beside the image."""
    v = w.value(4)
    c = w.shape(v)[1]
    deep = w.part(f"nn.Conv2d({c}, {c}, 3, padding=1, groups={c})")
    y = w.let(f"{norm_of(w, c)}({deep}({v}).permute(0, 2, 3, 1))", read=False)
    y = perceptron(w, y, c)
    y = w.let(f"{w.parameter(c)} * {y}", read=False) if w.chance(0.4) else y
    w.let(f"{v} + {y}.permute(0, 3, 1, 2)")


# ---- attention ---------------------------------------------------------------------------------------------------------


def attend(w: Writer, t: str) -> str:
    """What attention over the tokens `t` (examples, places, features) gives, the heads beside one another.

    Keys and values have the heads of the queries, fewer (shared by groups of queries), or one. Queries and keys may be normed
    and turned by their places; views that change nothing may stand anywhere, as captured networks have them.
    """
    b, n = f"{t}.{w.pick(('size(0)', 'shape[0]'))}", w.shape(t)[1]
    d, few, times = w.pick((1, 2, 2, 3, 4)), w.pick((1, 2, 3)), w.pick((1, 1, 1, 2, 3))
    h = few * times
    if w.chance(0.3):
        sizes = [h * d, few * d, few * d]
        made = f"{linear_of(w, sum(sizes), t)}({t})"
        if times == 1 and w.chance(0.5):
            parts = w.let(f"{made}.reshape({b}, {n}, 3, {h}, {d}).permute(2, 0, 3, 1, 4)", read=False)
            q, k, u = (w.let(f"{parts}[{i}]", read=False) for i in range(3))
        else:
            parts = w.let(f"{made}.split({sizes}, {w.pick(('-1', 'dim=2'))})", read=False)
            q, k, u = (_by_head(w, f"{parts}[{i}]", b, n, m, d) for i, m in enumerate((h, few, few)))
    else:
        q, k, u = (_by_head(w, f"{linear_of(w, m * d, t)}({t})", b, n, m, d) for m in (h, few, few))
    if w.chance(0.3):
        made = norm_of(w, d)
        q, k = (w.let(f"{used}({x})", read=False) for x, used in ((q, made), (k, w.pick((made, norm_of(w, d))))))
    if d % 2 == 0 and w.chance(0.4):
        q, k = _turned(w, q, k, n, d)
    grouped = "", ""
    if times > 1:
        how = w.draw.randrange(3)
        if how == 0 and few > 1:
            grouped = ", enable_gqa=True", ""
        elif how == 1 or few > 1:
            k, u = (w.let(_repeated(w, x, times, b, few, n, d), read=False) for x in (k, u))
    y = _product(w, q, k, u, (h, n, d), grouped[0])
    if w.chance(0.4):  # transformers' attention gives such a view, whatever the shape
        y = w.let(f"{y}.reshape({b}, {w.pick((h, '-1'))}, {n}, {d})", read=False)
    y = w.pick((f"{y}.transpose(1, 2)", f"{y}.permute(0, 2, 1, 3)", f"{y}.transpose(1, 2).contiguous()"))
    return w.let(y + w.pick((f".reshape({b}, {n}, {h * d})", f".reshape({b}, {n}, -1)", ".flatten(2)")), read=False)


def _by_head(w: Writer, x: str, b: str, n: int, h: int, d: int) -> str:
    size = w.pick((f"{b}, {n}, {h}, {d}", f"{b}, -1, {h}, {d}", f"{b}, {n}, -1, {d}"))
    return w.let(f"{x}.{w.pick(('view', 'reshape'))}({size}).transpose(1, 2)", read=False)


def _turned(w: Writer, q: str, k: str, n: int, d: int) -> tuple[str, ...]:
    """Rotary positions: halves of the features, or neighbours, are turned by angles that hang on the place."""
    cosine, sine = w.part(f"torch.rand({n}, {d})", "b"), w.part(f"torch.rand({n}, {d})", "b")
    half = d // 2
    turned = w.pick(
        (
            f"torch.cat([-{{x}}[..., {half}:], {{x}}[..., :{half}]], -1)",
            "torch.cat([-{x}.chunk(2, -1)[1], {x}.chunk(2, -1)[0]], dim=-1)",
            "torch.stack([-{x}[..., 1::2], {x}[..., ::2]], -1).flatten(-2)",
        )
    )
    return tuple(w.let(f"{x} * {cosine} + {turned.format(x=x)} * {sine}", read=False) for x in (q, k))


def _repeated(w: Writer, x: str, times: int, b: str, few: int, n: int, d: int) -> str:
    return w.pick(
        (
            f"{x}.repeat_interleave({times}, dim=1)",
            f"{x}[:, :, None].expand({b}, {few}, {times}, {n}, {d}).reshape({b}, {few * times}, {n}, {d})",
            f"{x}.unsqueeze(2).expand(-1, -1, {times}, -1, -1).flatten(1, 2)",
        )
    )


def _product(w: Writer, q: str, k: str, u: str, size: tuple[int, int, int], options: str) -> str:
    """Values weighed by queries and keys: fused, by hand, without weights of places, or over features instead of places."""
    h, n, d = size
    kind = 0 if options else w.draw.randrange(7)
    if kind < 3:
        bias = w.pick(("", "", ", is_causal=True", f", attn_mask={w.parameter(h, n, n)}", f", scale={d}"))
        return w.let(f"F.scaled_dot_product_attention({q}, {k}, {u}{bias}{options})", read=False)
    if kind == 3:
        return w.let(f"{q}.softmax(-1) @ ({k}.softmax(-2).transpose(-2, -1) @ {u})", read=False)
    if kind == 4 and w.shape(k)[1] == h:
        a = w.let(f"(F.normalize({q}, dim=-2).transpose(-2, -1) @ F.normalize({k}, dim=-2)).softmax(-1)", read=False)
        return w.let(f"({a} @ {u}.transpose(-2, -1)).transpose(-2, -1)", read=False)
    if kind == 5 and w.shape(k)[1] == h:
        one, two, three = (f"{x}.reshape(-1, {n}, {d})" for x in (q, k, u))
        a = w.let(f"torch.bmm({one}, {two}.transpose(1, 2)).mul({d} ** -0.5).softmax(-1)", read=False)
        return w.let(f"torch.bmm({a}, {three}).view(-1, {h}, {n}, {d})", read=False)
    products = [f"{q} @ {k}.transpose(-2, -1)", f"torch.matmul({q}, {k}.mT)"]
    products += [f"torch.einsum('bhid,bhjd->bhij', {q}, {k})"] if w.shape(k)[1] == h else []
    bias = w.pick(("", f" + {w.parameter(h, 1, 1)}", f" + {w.parameter(n, n)}"))
    a = w.let(f"({w.pick(products)} * {d} ** -0.5{bias}).softmax(-1)", read=False)
    return w.let(f"torch.matmul({a}, {u})", read=False)


def heads(w: Writer) -> None:
    t = tokens(w)
    y = attend(w, t)
    c = w.shape(t)[-1]
    if w.chance(0.8):
        y = w.let(f"{linear_of(w, w.pick((c, c, w.channels())), y)}({y})")
    if w.shape(y)[-1] == c and w.chance(0.7):
        w.let(f"{t} + {y}")
    elif y not in w.values:
        w.values.append(y)


def windows(w: Writer) -> None:
    """Attention within the windows of an image, which may be shifted."""
    v = w.value(4)
    _, c, high, wide = w.shape(v)
    if high % 2 or wide % 2:
        raise NotFitting
    b, k, shift = w.batch_of(v), 2, w.chance(0.3)
    x = w.let(f"{v}.permute(0, 2, 3, 1)", read=False)
    x = w.let(f"{norm_of(w, c)}({x})", read=False) if w.chance(0.5) else x
    x = w.let(f"torch.roll({x}, (-1, -1), (1, 2))", read=False) if shift else x
    t = w.let(
        f"{x}.view({b}, {high // k}, {k}, {wide // k}, {k}, {c}).permute(0, 1, 3, 2, 4, 5).reshape(-1, {k * k}, {c})",
        read=False,
    )
    y = attend(w, t)
    y = w.let(f"{linear_of(w, c, y)}({y})", read=False)
    y = w.let(
        f"{y}.view({b}, {high // k}, {wide // k}, {k}, {k}, {c}).permute(0, 1, 3, 2, 4, 5).reshape({b}, {high}, {wide}, {c})",
        read=False,
    )
    y = w.let(f"torch.roll({y}, (1, 1), (1, 2))", read=False) if shift else y
    w.let(f"{v} + {y}.permute(0, 3, 1, 2)")


def multihead(w: Writer) -> None:
    """torch's own modules for attention, of one tensor or of two, one behind another; with places first, over the batch."""
    t = tokens(w)
    c, h, d = w.shape(t)[-1], w.pick((1, 2, 3)), w.pick((1, 2, 3))
    x = query = w.let(f"{linear_of(w, h * d, t)}({t})")
    for _ in range(w.pick((1, 1, 2, 3))):
        options, other = f"batch_first={w.chance(0.7)}, bias={w.chance(0.6)}", w.pick((x, x, query))
        if w.chance(0.3):
            other, options = t, f"kdim={c}, vdim={c}, {options}"
        options += w.pick(("", "", "", ", add_bias_kv=True", ", add_zero_attn=True"))
        first = w.pick((x, query))
        made = w.part(f"nn.MultiheadAttention({h * d}, {h}, {options})")
        y = w.let(f"{made}({first}, {other}, {other}, need_weights={w.chance(0.5)})[0]")
        x = w.let(f"{first} + {y}") if w.chance(0.3) else w.let(f"{norm_of(w, h * d)}({y})") if w.chance(0.2) else y


# ---- recurrent modules and streams -------------------------------------------------------------------------------------


def recurrent_of(w: Writer, t: str) -> str:
    """The outputs of a recurrent module along the tokens."""
    kind, hidden = w.pick(("LSTM", "GRU", "RNN")), w.pick((2, 3, 4))
    options = f"batch_first=True, bidirectional={w.chance(0.3)}, bias={w.chance(0.8)}"
    options += f", proj_size={hidden - 1}" if kind == "LSTM" and w.chance(0.2) else ""
    options += ", nonlinearity='relu'" if kind == "RNN" and w.chance(0.3) else ""
    made = w.part(f"nn.{kind}({w.shape(t)[-1]}, {hidden}, {w.pick((1, 1, 2))}, {options})")
    return w.let(f"{made}({t})[0]")


def recurrent(w: Writer) -> None:
    """A recurrent module along the pixels; its outputs, or its last state."""
    found = recurrent_of(w, tokens(w))
    w.let(w.pick((f"{found}.transpose(1, 2)", f"{found}[:, -1]", f"{found}.mean(1)")))


def token_stream(w: Writer) -> None:
    """A residual stream that a layer, a recurrent module or an embedding begins; branches of attention and perceptrons."""
    t, kind = tokens(w), w.draw.randrange(3)
    if kind == 0:
        x = w.let(f"{linear_of(w, w.channels(), t)}({t})")
    elif kind == 1:
        x = recurrent_of(w, t)
    else:
        made = w.part(f"nn.Embedding(3, {w.channels()})")
        x = w.let(f"{made}(({t}.mean(2) > 0).long() + ({t}.mean(2) > 0.5).long())")
    c = w.shape(x)[-1]
    x = w.let(f"{norm_of(w, c)}({x})") if w.chance(0.3) else x
    x = w.let(f"{x} + {w.parameter(1, w.shape(x)[1], c)}") if w.chance(0.2) else x
    for _ in range(w.pick((1, 2, 2, 3))):
        place = w.pick(("before", "before", "behind", "none"))
        read = w.let(f"{norm_of(w, c)}({x})", read=False) if place == "before" else x
        if w.chance(0.5):
            y = attend(w, read)
            y = w.let(f"{linear_of(w, c, y)}({y})", read=False)
        else:
            y = perceptron(w, read, c)
        y = w.let(f"{w.parameter(c)} * {y}", read=False) if w.chance(0.15) else y
        x = w.let(f"{norm_of(w, c)}({x} + {y})" if place == "behind" else w.pick((f"{x} + {y}", f"{y} + {x}")))
    x = w.let(f"{norm_of(w, c)}({x})") if w.chance(0.3) else x
    w.let(w.pick((f"{x}.mean(1)", f"{x}[:, 0]", f"{x}.transpose(1, 2)", f"{linear_of(w, 3, x)}({x})")))


BLOCKS = (heads, heads, windows, multihead, recurrent, token_stream, token_stream, token_stream, convnext)
