"""What generated networks are made of: each function adds some statements to a `Writer`, or raises if nothing fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from . import tokens
from .tokens import norm_of, perceptron
from .writing import NotFitting, Writer

# ---- layers -----------------------------------------------------------------------------------------------------------


def _rank(w: Writer, value: str) -> int:
    return len(w.shape(value)) - 2


def conv(w: Writer) -> str:
    v = w.image()
    return w.let(f"{_conv_part(w, v)}({v})")


def _conv_part(w: Writer, v: str, out: int | None = None, same_size: bool = False) -> str:
    d, into = _rank(w, v), w.shape(v)[1]
    if d > 3:  # torch convolves at most three dimensions
        raise NotFitting
    groups = w.pick([g for g in (1, 1, 1, 2, 3, into) if into % g == 0])
    out = out or groups * w.pick((1, 2, 3) if groups > 1 else (1, 2, 3, 4, 5, 6, 8))
    if out % groups:
        groups = 1
    kernel = w.pick((1, 1, 3, 3)) if same_size else w.pick((1, 2, 3, 3))
    dilation = 1 if same_size or kernel == 1 else w.pick((1, 1, 1, 2))
    padding = kernel // 2 if same_size else w.pick((0, kernel // 2, dilation * (kernel // 2)))
    stride = 1 if same_size else w.pick((1, 1, 1, 2))
    mode = w.pick(("zeros", "zeros", "zeros", "circular", "replicate", "reflect")) if padding else "zeros"
    padding_text = "'same'" if same_size and w.chance(0.15) and kernel > 1 else str(padding)
    return _maybe_normed(
        w,
        f"nn.Conv{d}d({into}, {out}, {kernel}, stride={stride}, padding={padding_text}, dilation={dilation}, groups={groups}, "
        f"bias={w.chance(0.6)}, padding_mode='{mode}')",
    )


def _maybe_normed(w: Writer, made: str) -> str:
    """The layer, now and then with weight norm in one of torch's two forms."""
    if not w.chance(0.06):
        return w.part(made)
    return w.part(w.pick((f"nn.utils.parametrizations.weight_norm({made})", f"nn.utils.weight_norm({made})")))


def conv_block(w: Writer) -> None:
    conv(w)
    if w.chance(0.4):
        norm(w)
    if w.chance(0.7):
        activation(w)


def depthwise(w: Writer) -> None:
    v = w.image(least=2)
    d, c = _rank(w, v), w.shape(v)[1]
    times, kernel = w.pick((1, 1, 1, 2, 3)), w.pick((1, 3))
    made = w.part(f"nn.Conv{d}d({c}, {c * times}, {kernel}, padding={kernel // 2}, groups={c}, bias={w.chance(0.5)})")
    w.let(f"{made}({v})")


def transposed(w: Writer) -> None:
    v = w.image()
    d, into = _rank(w, v), w.shape(v)[1]
    groups = w.pick([g for g in (1, 1, 2, into) if into % g == 0])
    out, (kernel, stride, padding, extra) = w.channels(groups), w.pick(((2, 2, 0, 0), (3, 1, 1, 0), (4, 2, 1, 0), (3, 2, 1, 1)))
    if w.chance(0.3):
        weight = w.parameter(into, out // groups, *[kernel] * d)
        bias = w.parameter(out) if w.chance(0.5) else "None"
        w.let(
            f"F.conv_transpose{d}d({v}, {weight}, {bias}, stride={stride}, padding={padding}, output_padding={extra}, "
            f"groups={groups})"
        )
        return
    made = w.part(
        f"nn.ConvTranspose{d}d({into}, {out}, {kernel}, {stride}, {padding}, {extra}, groups={groups}, bias={w.chance(0.5)})"
    )
    w.let(f"{made}({v})")


def functional_conv(w: Writer) -> None:
    v = w.image()
    d, into = _rank(w, v), w.shape(v)[1]
    groups = w.pick([g for g in (1, 1, 2, into) if into % g == 0])
    out, kernel = w.channels(groups), w.pick((1, 3))
    weight = w.parameter(out, into // groups, *[kernel] * d)
    bias = w.pick((w.parameter(out), "None", "None"))
    kind = w.draw.randrange(8)
    dims = tuple(range(1, d + 2))
    if kind == 0:  # weight standardisation
        weight = w.let(f"{weight} - {weight}.mean({dims}, keepdim=True)", read=False)
        weight = w.let(f"{weight} / ({weight}.pow(2).mean({dims}, keepdim=True) + 0.1).sqrt()", read=False)
    elif kind == 1:  # a gain for every filter
        weight = w.let(f"{weight} * {w.parameter(out, *[1] * (d + 1))}", read=False)
    elif kind == 2:
        weight = w.let(f"{weight} * {w.part('0.7', 'n')}", read=False)
    elif kind == 3:  # demodulated: every filter has norm 1
        weight = w.let(f"{weight} * ({weight}.square().sum({dims}, keepdim=True) + 0.01).rsqrt()", read=False)
    elif kind == 4:  # some weights are masked
        shape = w.pick(((out, into // groups, *[1] * d), (1, 1, *[kernel] * d)))
        bits = [w.draw.randrange(2) for _ in range(math.prod(shape))]
        mask = w.part(f"torch.tensor({bits}).view({shape}).bool()", "b")
        weight = w.let(w.pick((f"{weight} * {mask}", f"{weight}.masked_fill(~{mask}, 0.0)")), read=False)
    if w.chance(0.5):
        w.let(f"F.conv{d}d({v}, {weight}, {bias}, {w.pick((1, 1, 2))}, {kernel // 2}, 1, {groups})")
    else:
        w.let(f"F.conv{d}d({v}, weight={weight}, bias={bias}, padding={kernel // 2}, groups={groups})")


def linear(w: Writer) -> None:
    """On the last axis, whatever lies there: features, or the columns of an image."""
    v = w.value()
    into, out = w.shape(v)[-1], w.channels()
    if w.chance(0.25):
        weight, bias = w.parameter(out, into), w.pick((w.parameter(out), "None"))
        if w.chance(0.3):
            weight = w.let(f"{weight} * {w.parameter(out, 1)}", read=False)
        w.let(w.pick((f"F.linear({v}, {weight}, {bias})", f"{v} @ {weight}.t()", f"torch.matmul({v}, {weight}.T)")))
    else:
        made = _maybe_normed(w, f"nn.Linear({into}, {out}, bias={w.chance(0.7)})")
        w.let(f"{made}({v})")
    if w.chance(0.5):
        activation(w)


def linear_on_channels(w: Writer) -> None:
    """A perceptron at every pixel: channels last and back."""
    v = w.image()
    d, c = _rank(w, v), w.shape(v)[1]
    out = w.pick((c, w.channels()))
    made = w.part(f"nn.Linear({c}, {out}, bias={w.chance(0.7)})")
    last, first = (0, *range(2, d + 2), 1), (0, d + 1, *range(1, d + 1))
    norm_ = w.part(f"nn.LayerNorm({c})") if w.chance(0.3) else ""
    kind = w.draw.randrange(3)
    if kind == 0:
        inner = f"{v}.permute{last}"
        w.let(f"{made}({norm_}({inner})).permute{first}" if norm_ else f"{made}({inner}).permute{first}")
    elif kind == 1:
        tokens = w.let(f"{v}.flatten(2).transpose(1, 2)")
        y = w.let(f"{made}({norm_}({tokens}))" if norm_ else f"{made}({tokens})")
        if w.chance(0.7):
            size = ", ".join(str(n) for n in w.shape(v)[2:])
            size = w.pick((size, f"*{v}.shape[2:]"))
            w.let(f"{y}.transpose(1, 2).reshape({w.pick((w.batch_of(v), '-1'))}, {out}, {size})")
    else:
        w.let(f"{made}(torch.movedim({v}, 1, -1)).movedim(-1, 1)")


def einsum(w: Writer) -> None:
    v = w.image()
    out, space = w.channels(), "hwd"[: _rank(w, v)]
    w.let(f"torch.einsum('oc,bc{space}->bo{space}', {w.parameter(out, w.shape(v)[1])}, {v})")


# ---- norms and activations ---------------------------------------------------------------------------------------------


def norm(w: Writer) -> None:
    v = w.value()
    shape = w.shape(v)
    d, c = len(shape) - 2, shape[1]
    if d > 3:
        return
    if d == 0:
        w.let(f"{w.part(w.pick((f'nn.BatchNorm1d({c})', f'nn.LayerNorm({c})', f'nn.BatchNorm1d({c}, affine=False)')))}({v})")
        return
    groups = w.pick([g for g in (1, 2, 3, c) if c % g == 0])
    made = [f"nn.BatchNorm{d}d({c})"] * 4 + [
        f"nn.BatchNorm{d}d({c}, affine=False)",
        f"nn.BatchNorm{d}d({c}, momentum=0.3, eps=0.01)",
        f"nn.InstanceNorm{d}d({c}, affine=True)",
        f"nn.InstanceNorm{d}d({c})",
        f"nn.InstanceNorm{d}d({c}, affine=True, track_running_stats=True)",
        f"nn.GroupNorm({groups}, {c})",
        f"nn.LayerNorm({list(shape[1:])})",
        f"nn.LayerNorm({shape[-1]})",
    ]
    w.let(f"{w.part(w.pick(made))}({v})")


def functional_norm(w: Writer) -> None:
    v = w.value()
    c = w.shape(v)[1]
    kind = w.draw.randrange(4)
    if kind < 2:
        mean, var = w.part(f"torch.rand({c})", "b"), w.part(f"torch.rand({c})", "b")
        with torch.no_grad():
            w.space["s"].get_buffer(var[2:]).abs_().add_(0.5)
        w.parts[-1] = w.parts[-1].replace(f"'{var[2:]}'", f"'{var[2:]}_var'")  # so that it is drawn positive
        w.net.register_buffer(f"{var[2:]}_var", w.space["s"].get_buffer(var[2:]))
        var = f"{var}_var"
        affine = f"{w.parameter(c)}, {w.parameter(c)}" if w.chance(0.6) else "None, None"
        training = w.pick(("s.training", "False"))
        w.let(f"F.batch_norm({v}, {mean}, {var}, {affine}, training={training})")
    elif kind == 2:
        n = w.shape(v)[-1]
        w.let(f"F.layer_norm({v}, ({n},), {w.parameter(n)}, {w.parameter(n)})")
    else:
        w.let(f"F.group_norm({v}, 1, {w.parameter(c)}, {w.parameter(c)})")


ACTIVATIONS = (
    *("nn.ReLU()", "nn.ReLU(inplace=True)", "nn.GELU()", "nn.SiLU()", "nn.Sigmoid()", "nn.Tanh()", "nn.Hardswish()"),
    *("nn.LeakyReLU(0.1)", "nn.LeakyReLU(0.1, inplace=True)", "nn.ELU()", "nn.SELU()", "nn.CELU()", "nn.Softplus()"),
    *("nn.Mish()", "nn.ReLU6()", "nn.Hardsigmoid()", "nn.Hardtanh(0.25, 2.0)", "nn.Softsign()", "nn.PReLU()", "nn.Softmax(1)"),
    *("nn.Softmax(-1)", "nn.Hardtanh()", "nn.Threshold(0.1, 0.7)", "nn.Dropout(0.3)", "nn.Identity()", "nn.Tanhshrink()"),
    *("nn.Softshrink(0.2)", "nn.LogSigmoid()", "nn.AlphaDropout(0.2)", "nn.RReLU()", "nn.Softmin(1)", "nn.Hardshrink(0.2)"),
)
FUNCTIONS = (
    *("F.relu({v})", "torch.relu({v})", "{v}.relu()", "F.gelu({v})", "F.silu({v})", "torch.sigmoid({v})", "{v}.tanh()"),
    *("{v}.abs()", "{v}.clamp(-1, 2)", "{v}.clamp(min=0.2)", "torch.clamp({v}, max=1.5)", "F.softplus({v})", "-{v}"),
    *("F.leaky_relu({v}, 0.2)", "{v}.exp()", "{v} ** 2", "{v}.pow(2)", "torch.pow({v}, 2)", "{v}.square()", "{v} ** 3"),
    *("F.hardswish({v})", "{v}.sigmoid() * {v}", "{v} * torch.tanh(F.softplus({v}))", "torch.sin({v})", "torch.cos({v})"),
    *("F.softmax({v}, dim=1)", "{v}.softmax(-1)", "F.normalize({v} + 0.5, dim=1)", "F.relu6({v})", "F.elu({v})", "{v}.neg()"),
    *("F.dropout({v}, 0.2, s.training)", "F.relu({v}, inplace=True)", "{v}.erf()", "torch.atan({v})", "{v}.detach()"),
    *(
        "{v}.contiguous()",
        "{v}.clone()",
        "{v}.to(torch.float64)",
        "{v}.log1p() if False else {v}",
        "torch.where({v} > 0, {v}, 0.1 * {v})",
    ),
)


def activation(w: Writer) -> None:
    v = w.value()
    c = w.shape(v)[1]
    if w.chance(0.12):
        w.let(f"{w.part(f'nn.PReLU({c})')}({v})")
    elif w.chance(0.5):
        w.let(f"{w.part(w.pick(ACTIVATIONS[:10] if w.chance(0.5) else ACTIVATIONS))}({v})")
    else:
        w.let(w.pick(FUNCTIONS[:8] if w.chance(0.5) else FUNCTIONS).format(v=v))


def star_relu(w: Writer) -> None:
    """scale · relu(x)² + bias, both of one value."""
    v = w.value()
    scale, bias = w.tensor(*w.pick(((), (1,)))), w.tensor(*w.pick(((), (1,))))
    w.let(
        w.pick(
            (
                f"{scale} * F.relu({v}) ** 2 + {bias}",
                f"{scale} * torch.relu({v}).pow(2) + {bias}",
                f"{bias} + torch.square(F.relu({v})) * {scale}",
            )
        )
    )


# ---- broadcasting ------------------------------------------------------------------------------------------------------

PAIRS = (
    *("{a} + {b}", "{b} + {a}", "{a} - {b}", "{b} - {a}", "{a} * {b}", "{b} * {a}", "torch.maximum({a}, {b})"),
    *("torch.minimum({b}, {a})", "torch.add({a}, {b})", "torch.add({b}, {a}, alpha=0.5)", "torch.sub({a}, {b})"),
    *(
        "torch.rsub({a}, {b})",
        "torch.mul({b}, {a})",
        "{a}.add({b})",
        "{a}.mul({b})",
        "{a}.sub({b}, alpha=2)",
        "{a} / ({b}.abs() + 1)",
    ),
    *("torch.max({a}, {b})", "{b}.expand_as({a}) + {a}", "{a} + {b}.expand_as({a})", "{b}.expand_as({a}) * {a}"),
    *("torch.where({a} > 0, {a}, {b})", "torch.lerp({a}, {b}.expand_as({a}), 0.3)", "torch.addcmul({a}, {a}, {b})"),
    *("{b}.expand({a}.shape) - {a}", "({a} + {b}).relu()", "torch.stack([{a}, {b}.expand_as({a})], 0).sum(0)"),
)


def _pair(w: Writer, a: str, b: str) -> str:
    return w.let(w.pick(PAIRS[:8] if w.chance(0.6) else PAIRS).format(a=a, b=b))


def broadcast_term(w: Writer) -> None:
    """A parameter or buffer of any shape that broadcasts to a value, or makes it larger."""
    v = w.value()
    shape = w.shape(v)
    c, space = shape[1], shape[2:]
    forms: list[tuple[int, ...]] = [
        (),
        (1,),
        (shape[-1],),
        (1, c, *[1] * len(space)),
        (c, *[1] * len(space)),
        shape[1:],
        (1, *shape[1:]),
    ]
    forms += (
        [(1, 1, *space), (1, *space), space, (1, c, *space[:-1], 1), (c, *[1] * (len(space) - 1), space[-1])] if space else []
    )
    forms += [(1,) * len(shape), (1, c, *space), (c, 1)] if space else [(1, c), (1, 1)]
    if c == 1 and w.chance(0.5):
        forms += [(3, *[1] * len(space))]
    term = w.tensor(*w.pick(forms))
    if w.chance(0.08):
        term = w.let(w.pick((f"{term}.sigmoid()", f"torch.exp({term})", f"{term}[None]", f"{term} * 2")), read=False)
    if w.chance(0.15):
        w.do(w.pick((f"{v} += {term}", f"{v} *= {term}", f"{v} -= {term}", f"{v}.add_({term})", f"{v}.mul_({term})")))
    else:
        _pair(w, v, term)


def number(w: Writer) -> None:
    v = w.value()
    forms = (
        "{v} * 0.5",
        "2 - {v}",
        "{v} + 1",
        "1 + {v}",
        "{v} / 3",
        "{v} - 0.3",
        "torch.rsub({v}, 1)",
        "{v}.mul(2).add(0.1)",
        "0.7 * {v}",
    )
    forms += (
        "torch.div({v}, 2.5)",
        "{v}.div(4)",
        "torch.add({v}, 2)",
        "{v}.sub(1)",
        "{v} / {v}.size(1)",
        "{v} * {v}.shape[1] ** -0.5",
    )
    w.let(w.pick(forms).format(v=v))


def narrow_with_wide(w: Writer) -> None:
    """Something of one channel, one pixel or one example joined with something wider."""
    v = w.image()
    d = _rank(w, v)
    kind = w.draw.randrange(6)
    if kind == 0:
        n = w.let(f"{w.part(f'nn.Conv{d}d({w.shape(v)[1]}, 1, 1)')}({v})")
    elif kind == 1:
        n = w.let(f"{v}.mean(1, keepdim=True)")
    elif kind == 2:
        n = w.let(f"{v}.mean({tuple(range(2, d + 2))}, keepdim=True)")
    elif kind == 3:
        n = w.let(f"{v}[:1]")
    elif kind == 4:
        n = w.let(f"{v}.amax(-1, keepdim=True)")
    else:
        n = w.let(f"{v}[:, :1]")
    if w.chance(0.3):
        n = w.let(w.pick((f"{n}.sigmoid()", f"F.relu({n})")))
    wide = w.value(d + 2) if w.chance(0.3) else v
    _pair(w, wide, n)


def join(w: Writer) -> None:
    a = w.value()
    b = w.value(same=w.shape(a))
    _pair(w, a, b)


# ---- shapes ------------------------------------------------------------------------------------------------------------


def pool(w: Writer) -> None:
    v = w.image()
    d, n = _rank(w, v), min(w.shape(v)[2:])
    forms = [
        f"nn.MaxPool{d}d({w.pick((2, 3))}, stride={w.pick((1, 2))}, padding={w.pick((0, 1))}, ceil_mode={w.chance(0.3)})",
        f"nn.AvgPool{d}d({w.pick((2, 3))}, stride={w.pick((1, 2))}, padding={w.pick((0, 1))}, ceil_mode={w.chance(0.3)}, "
        f"count_include_pad={w.chance(0.5)})",
        f"nn.AdaptiveAvgPool{d}d({w.pick((1, 2))})",
        f"nn.AdaptiveMaxPool{d}d({w.pick((1, 2))})",
        "nn.Upsample(scale_factor=2, mode='nearest')" if n <= 4 else f"nn.MaxPool{d}d(2)",
    ]
    functions = [
        f"F.max_pool{d}d({v}, 2)",
        f"F.avg_pool{d}d({v}, 3, 1, 1, count_include_pad=False)",
        f"F.adaptive_avg_pool{d}d({v}, 1)",
        f"F.interpolate({v}, scale_factor=2.0)",
        f"F.pad({v}, ({w.pick((0, 1))}, 1), value={w.pick((0.0, 0.0, 1.5))})",
        f"F.pad({v}, (1, 1), mode='{w.pick(('replicate', 'reflect', 'circular'))}')" if d == 1 else f"F.pad({v}, (0, 1) * {d})",
    ]
    w.let(f"{w.part(w.pick(forms))}({v})" if w.chance(0.6) else w.pick(functions))


def reduce_(w: Writer) -> None:
    v = w.image()
    d = _rank(w, v)
    space = tuple(range(2, d + 2))
    back = tuple(range(-d, 0))
    dims = w.pick((space, back, -1, 2, [*space], 1, (1, *space), (1, -1)))
    keep = w.pick(("", ", keepdim=True", ", keepdim=False"))
    word = w.pick(("mean", "sum", "amax", "amin", "mean", "std"))
    text = w.pick((f"{v}.{word}({dims}{keep})", f"torch.{word}({v}, dim={dims}{keep})"))
    if w.chance(0.06):
        text = w.pick(
            (f"{v}.mean(dim=[], keepdim=True)", f"{v}.mean(0, keepdim=True)", f"{v}.max(1, keepdim=True)[0]", f"{v}.cumsum(-1)")
        )
    if w.chance(0.1):
        text = f"{v}.mean(-1).mean(-1)"
    w.let(text)


def flatten(w: Writer) -> None:
    v = w.image()
    shape = w.shape(v)
    c, size = shape[1], math.prod(shape[2:])
    b = w.batch_of(v)
    kinds = (
        *(f"torch.flatten({v}, 1)", f"{v}.flatten(1)", f"{v}.reshape({b}, -1)", f"{v}.contiguous().view({b}, {c * size})"),
        *(
            f"{v}.reshape(-1, {c * size})",
            f"{w.part('nn.Flatten()')}({v})",
            f"{v}.flatten(start_dim=1, end_dim=-1)",
            f"{v}.flatten(2)",
        ),
        *(f"{v}.reshape({b}, {c}, -1)", f"{v}.reshape({b}, {size}, {c})", f"{v}.flatten(1, 2)", f"{v}.reshape({b} * {c}, -1)"),
    )
    y = w.let(w.pick(kinds))
    if w.chance(0.5):
        y = w.let(f"{w.part(f'nn.Linear({w.shape(y)[-1]}, {w.shape(y)[-1] if w.chance(0.3) else w.channels()})')}({y})")
    if w.chance(0.35) and math.prod(w.shape(y)[1:]) == c * size:  # and back to images
        size_ = ", ".join(map(str, shape[2:]))
        w.let(
            w.pick(
                (
                    f"{y}.reshape({b}, {c}, {size_})",
                    f"{y}.view(-1, {c}, {size_})",
                    f"{y}.view_as({v})",
                    f"{y}.reshape({v}.shape)",
                )
            )
        )


def image_from_vector(w: Writer) -> None:
    """A linear layer whose neurons become an image."""
    v = w.value(2)
    c, n = w.pick((2, 3, 4)), w.pick((2, 3))
    y = w.let(f"{w.part(f'nn.Linear({w.shape(v)[1]}, {c * n * n})')}({v})")
    y = w.let(f"{y}.{w.pick(('view', 'reshape'))}({w.pick((w.batch_of(v), '-1'))}, {c}, {n}, {n})")
    if w.chance(0.6):
        w.let(f"{_conv_part(w, y)}({y})")


def shuffle(w: Writer) -> None:
    v = w.value(4, 3, least=2)
    shape = w.shape(v)
    c = shape[1]
    g = w.pick([g for g in range(2, c + 1) if c % g == 0])
    size = ", ".join(w.pick((str(n), f"{v}.size({i})")) for i, n in enumerate(shape[2:], 2))
    b = w.batch_of(v)
    forms = (
        f"{v}.view({b}, {g}, {c // g}, {size}).transpose(1, 2).contiguous().view({b}, {c}, {size})",
        f"{v}.reshape({b}, {g}, {c // g}, {size}).transpose(1, 2).reshape({b}, -1, {size})",
        f"{w.part(f'nn.ChannelShuffle({g})')}({v})",
        f"{v}.reshape({b}, {g}, -1, {size}).flip(1).flatten(1, 2)" if len(shape) == 4 else f"torch.channel_shuffle({v}, {g})",
        f"{v}.reshape({b}, {g}, {c // g}, {size}).sum(1)",
        f"{v}.view({b}, {g}, {c // g}, {size}).mean(2)",
        f"{v}.reshape({b}, {g}, {c // g}, {size}).permute(0, 2, 1, *range(3, {len(shape) + 1})).flatten(1, 2)",
        f"{v}.unflatten(1, ({g}, {c // g})).amax(1)",
        f"{w.part('nn.PixelShuffle(2)')}({v})" if c % 4 == 0 and len(shape) == 4 else f"{v}.roll(1, 1)",
    )
    w.let(w.pick(forms))


def into_batch(w: Writer) -> None:
    """Groups of channels go into the batch, something happens there, and they come back."""
    v = w.image(least=2)
    shape = w.shape(v)
    c = shape[1]
    g = w.pick([g for g in range(2, c + 1) if c % g == 0])
    b = w.batch_of(v)
    size = ", ".join(w.pick((str(n), f"{v}.size({i})")) for i, n in enumerate(shape[2:], 2))
    rest = w.pick((str(c // g), "-1", f"{v}.size(1) // {g}"))
    y = w.let(f"{v}.{w.pick(('reshape', 'view'))}({b} * {g}, {rest}, {size})")
    kind = w.draw.randrange(6)
    if kind == 0:
        y = w.let(f"{y} * torch.sigmoid({y}.mean({tuple(range(2, len(shape)))}, keepdim=True))")
    elif kind == 1:
        y = w.let(f"F.relu({y})")
    elif kind == 2:
        y = w.let(f"{_conv_part(w, y, out=c // g, same_size=True)}({y})")
    elif kind == 3:
        y = w.let(f"{w.part(f'nn.GroupNorm(1, {c // g})')}({y})")
    elif kind == 4:
        y = w.let(f"{y} * {w.parameter(1, c // g, *[1] * (len(shape) - 2))}")
    back = w.pick((f"{b}, {c}", f"-1, {c}", f"{b}, -1"))
    w.let(f"{y}.{w.pick(('reshape', 'view'))}({back}, {size})")


def permuted(w: Writer) -> None:
    v = w.value(3, 4, 5)
    n = len(w.shape(v))
    order = list(range(1, n))
    w.draw.shuffle(order)
    i, j = w.draw.sample(range(1, n), 2)
    forms = (f"{v}.permute(0, {', '.join(map(str, order))})", f"{v}.transpose({i}, {j})", f"torch.transpose({v}, {i}, {j})")
    forms += (
        f"torch.permute({v}, (0, {', '.join(map(str, order))}))",
        f"{v}.swapaxes({i}, {j})",
        f"{v}.flip({i})",
        f"torch.roll({v}, 1, {i})",
    )
    w.let(w.pick(forms))


def squeeze(w: Writer) -> None:
    v = w.value()
    shape = w.shape(v)
    ones = [i for i, n in enumerate(shape) if n == 1 and i > 0]
    if ones and w.chance(0.7):
        i = w.pick(ones)
        w.let(w.pick((f"{v}.squeeze({i})", f"torch.squeeze({v}, {i})", f"{v}.squeeze({i - len(shape)})", f"{v}.squeeze(-1)")))
    else:
        i = w.pick(range(1, len(shape) + 1))
        y = w.let(
            w.pick((f"{v}.unsqueeze({i})", f"torch.unsqueeze({v}, {i - len(shape) - 1})", f"{v}[..., None]", f"{v}[:, None]"))
        )
        if w.chance(0.4):
            w.let(f"{y}.squeeze({i})")


# ---- parts of channels ---------------------------------------------------------------------------------------------------


def parts_of(w: Writer) -> None:
    """Slices and splits; often only some of the parts are read."""
    v = w.value(least=2)
    shape = w.shape(v)
    c = shape[1]
    k = w.draw.randrange(1, c)
    kind = w.draw.randrange(7)
    if kind == 0:
        i, j = sorted(w.draw.sample(range(c + 1), 2))
        w.let(
            w.pick(
                (
                    f"{v}[:, {i}:{j}]",
                    f"{v}[:, {i}:{j}, ...]",
                    f"{v}.narrow(1, {i}, {j - i})",
                    f"torch.narrow({v}, 1, {i}, {j - i})",
                )
            )
        )
    elif kind == 1:
        y = w.let(
            w.pick(
                (f"torch.chunk({v}, {w.pick((2, 3))}, 1)", f"{v}.chunk(2, dim=1)", f"torch.tensor_split({v}, ({k},), dim=1)")
            )
        )
        _read_some(w, y)
    elif kind == 2:
        y = w.let(
            w.pick((f"{v}.split([{k}, {c - k}], 1)", f"torch.split({v}, [{k}, {c - k}], dim=1)", f"{v}.split({k}, dim=1)"))
        )
        _read_some(w, y)
    elif kind == 3:
        w.let(w.pick((f"{v}[:, ::2]", f"{v}[:, 1::2]", f"{v}[:, -{k}:]", f"{v}[:, :-{k}]", f"{v}[:, {k}]")))
    elif kind == 4:
        ids = [w.draw.randrange(c) for _ in range(w.pick((1, 2, 3, 4)))]
        at = w.fresh("i")
        w.statement(f"s.register_buffer('{at}', torch.tensor({ids}))")
        w.let(w.pick((f"{v}.index_select(1, s.{at})", f"{v}[:, s.{at}]", f"torch.index_select({v}, 1, s.{at})")))
    elif kind == 5:
        w.let(
            f"F.pad({v}, {(0, 0) * (len(shape) - 2) + (w.pick((0, 1, 2)), w.pick((0, 1, 3)))}, value={w.pick((0.0, 0.0, 1.5))})"
        )
    else:
        a, b = f"{v}[:, :{k}]", f"{v}[:, {k}:]"
        a = f"F.relu({a})" if w.chance(0.5) else a
        w.let(f"torch.cat([{b}, {a}], 1)")


def _read_some(w: Writer, parts: str) -> None:
    count = len(w.space[parts])
    ids = [i for i in range(count) if w.chance(0.6)] or [w.draw.randrange(count)]
    made = [w.let(f"{parts}[{i}]") for i in ids]
    if len(made) > 1 and w.chance(0.6):
        w.let(
            w.pick(
                (
                    f"torch.cat(({', '.join(reversed(made))},), 1)",
                    f"{made[0]} + {made[1]}",
                    f"{made[0]} * torch.sigmoid({made[1]})",
                )
            )
        )


def concatenate(w: Writer) -> None:
    a = w.value()
    shape = w.shape(a)
    fitting = [
        v for v in w.values if len(w.shape(v)) == len(shape) and w.shape(v)[0] == shape[0] and w.shape(v)[2:] == shape[2:]
    ]
    chosen = [a, *[w.pick(fitting) for _ in range(w.pick((1, 1, 2)))]]
    w.draw.shuffle(chosen)
    if w.chance(0.1):
        chosen.append(w.tensor(1, *shape[1:]) + f".expand({w.batch_of(a)}, {', '.join(map(str, ['-1'] * (len(shape) - 1)))})")
    axis = w.pick((1, 1, 1, 1, -len(shape) + 1, -1))
    w.let(
        w.pick(
            (
                f"torch.cat([{', '.join(chosen)}], {axis})",
                f"torch.cat(({', '.join(chosen)},), dim={axis})",
                f"torch.concat([{', '.join(chosen)}], {axis})",
            )
        )
    )


# ---- larger blocks -------------------------------------------------------------------------------------------------------


def _norm_of(w: Writer, y: str) -> str:
    """A norm of an image: of each channel alone, or of groups of channels."""
    c, d = w.shape(y)[1], _rank(w, y)
    groups = w.pick([g for g in (1, 2, 3, 4, c) if c % g == 0])
    made = w.pick((*[f"nn.BatchNorm{d}d({c})"] * 4, f"nn.GroupNorm({groups}, {c})", f"nn.InstanceNorm{d}d({c}, affine=True)"))
    return w.let(f"{w.part(made)}({y})")


def perceptrons_beside_a_stream(w: Writer) -> None:
    """Residual blocks at every pixel, with a norm over the channels before the branch, at its end or behind the sum."""
    v = w.image()
    d, c = _rank(w, v), w.shape(v)[1]
    x = w.let(f"{v}.permute{(0, *range(2, d + 2), 1)}")
    for _ in range(w.pick((1, 2))):
        made, place = norm_of(w, c), w.draw.randrange(3)
        y = perceptron(w, w.let(f"{made}({x})") if place == 0 else x, c)
        if w.chance(0.3):
            y = w.let(f"{w.parameter(c)} * {y}")
        x = w.let(f"{x} + {made}({y})" if place == 1 else f"{made}({x} + {y})" if place == 2 else f"{x} + {y}")
    w.let(f"{x}.permute{(0, d + 1, *range(1, d + 1))}")


def residual(w: Writer) -> None:
    v = w.image()
    c = w.shape(v)[1]
    read = _norm_of(w, v) if w.chance(0.15) else v
    y = w.let(f"{_conv_part(w, v, out=w.channels(), same_size=True)}({read})")
    if w.chance(0.5):
        y = _norm_of(w, y)
    if w.chance(0.7):
        y = w.let(w.pick(FUNCTIONS[:5]).format(v=y))
    y = w.let(f"{_conv_part(w, y, out=c, same_size=True)}({y})")
    if w.chance(0.3):
        y = _norm_of(w, y)
    if w.chance(0.15):
        y = w.let(f"{w.parameter(*w.pick(((c, *[1] * _rank(w, v)), (1, c, *[1] * _rank(w, v)), (1,))))} * {y}")
    if w.chance(0.2):
        w.do(w.pick((f"{y} += {v}", f"{y}.add_({v})")))
        y = w.let(f"F.relu({y})")
    else:
        y = w.let(w.pick((f"{v} + {y}", f"{y} + {v}", f"torch.add({v}, {y})", f"{v} - {y}", f"{y} + 0.5 * {v}")))
    if w.chance(0.5):
        w.let(w.pick(FUNCTIONS[:8]).format(v=y))


def projection(w: Writer) -> None:
    v = w.image()
    out = w.channels()
    d = _rank(w, v)
    y = w.let(f"{_conv_part(w, v, out=out, same_size=True)}({v})")
    if w.chance(0.5):
        y = w.let(f"{w.part(f'nn.BatchNorm{d}d({out})')}({y})")
    z = w.let(f"{w.part(f'nn.Conv{d}d({w.shape(v)[1]}, {out}, 1, bias={w.chance(0.5)})')}({v})")
    w.let(
        w.pick(
            (
                f"{z} + {y}",
                f"{y} + {z}",
                f"F.relu({y} + {z})",
                f"{y} * {z}",
                f"{y} * torch.sigmoid({z})",
                f"torch.maximum({y}, {z})",
            )
        )
    )


def option_a(w: Writer) -> None:
    """A strided slice padded with empty channels, beside a strided convolution."""
    v = w.value(4)
    c, more = w.shape(v)[1], w.pick((0, 1, 2, 3, 4))
    before = w.pick((0, more // 2, more))
    y = w.let(f"{w.part(f'nn.Conv2d({c}, {c + more}, 3, stride=2, padding=1, bias={w.chance(0.5)})')}({v})")
    z = w.let(f"F.pad({v}[:, :, ::2, ::2], (0, 0, 0, 0, {before}, {more - before}))")
    y = w.let(w.pick((f"{y} + {z}", f"{z} + {y}")))
    if w.chance(0.6):
        w.let(f"F.relu({y})")


def gate(w: Writer) -> None:
    v = w.image()
    d, c = _rank(w, v), w.shape(v)[1]
    space = tuple(range(2, d + 2))
    inner = w.pick((1, 2, 3))
    kind = w.draw.randrange(5)
    if kind == 0:
        a, b = w.part(f"nn.Conv{d}d({c}, {inner}, 1)"), w.part(f"nn.Conv{d}d({inner}, {c}, 1)")
        g = w.let(f"torch.sigmoid({b}(F.relu({a}({v}.mean({space}, keepdim=True)))))")
    elif kind == 1:
        a, b = w.part(f"nn.Linear({c}, {inner})"), w.part(f"nn.Linear({inner}, {c})")
        g = w.let(f"{b}(F.relu({a}({v}.mean({space})))).sigmoid()")
        g = w.let(
            w.pick(
                (
                    f"{g}[..., {', '.join(['None'] * d)}]",
                    f"{g}.view({w.batch_of(v)}, {c}, {', '.join('1' * d)})",
                    f"{g}.reshape(-1, {c}, {', '.join('1' * d)})",
                )
            )
        )
    elif kind == 2:
        a = w.part(f"nn.Conv{d}d(2, 1, 3, padding=1)")
        g = w.let(f"torch.sigmoid({a}(torch.cat([{v}.mean(1, keepdim=True), {v}.amax(1, keepdim=True)], 1)))")
    elif kind == 3:  # two gates from one layer
        a = w.part(f"nn.Linear({c}, {2 * c})")
        t = w.let(f"{a}({v}.{w.pick(('mean', 'amax'))}({space})).chunk(2, 1)")
        ones = ", ".join("1" * d)
        w.let(f"{v} * {t}[0].reshape({w.batch_of(v)}, {c}, {ones}) + {t}[1].reshape(-1, {c}, {ones})")
        return
    else:  # efficient channel attention: a convolution along the channels
        a = w.part("nn.Conv1d(1, 1, 3, padding=1, bias=False)")
        g = w.let(f"{a}({v}.mean({space}).unsqueeze(1)).squeeze(1).sigmoid()")
        g = w.let(f"{g}[..., {', '.join(['None'] * d)}]")
    w.let(
        w.pick(
            (f"{v} * {g}", f"{g} * {v}", f"{v} * {g}.expand_as({v})", f"{v} + {v} * {g}", f"{v} + {g}", f"torch.mul({g}, {v})")
        )
    )


def glu(w: Writer) -> None:
    v = w.value(least=2)
    c = w.shape(v)[1]
    if c % 2:
        raise NotFitting
    if w.chance(0.5):
        w.let(w.pick((f"F.glu({v}, dim=1)", f"{w.part('nn.GLU(dim=1)')}({v})", f"F.glu({v}, 1)")))
        return
    t = w.let(f"{v}.chunk(2, {w.pick(('dim=1', '1'))})")
    w.let(
        w.pick((f"{t}[0] * {t}[1]", f"{t}[0] * {t}[1].sigmoid()", f"F.silu({t}[0]) * {t}[1]", f"torch.maximum({t}[0], {t}[1])"))
    )


def shared(w: Writer) -> None:
    """A module that is called twice, or a weight with two owners."""
    v = w.value()
    shape = w.shape(v)
    c, d = shape[1], len(shape) - 2
    kind = w.draw.randrange(5)
    if kind == 0 and d:
        made = _conv_part(w, v, out=c, same_size=True)
        w.let(f"{made}(F.relu({made}({v})))")
    elif kind == 1 and d:
        made = _conv_part(w, v, same_size=True)
        a = w.let(f"{made}({v})")
        b = w.let(f"{made}({w.value(same=shape)})")
        w.let(w.pick((f"{a} + {b}", f"torch.cat([{a}, {b}], 1)", f"{a} * {b}")))
    elif kind == 2:
        a, b = w.part(f"nn.Linear({shape[-1]}, {shape[-1]})"), w.part(f"nn.Linear({shape[-1]}, {shape[-1]})")
        w.statement(f"{b}.weight = {a}.weight")
        w.let(f"{b}(F.relu({a}({v})))")
    elif kind == 3:
        act = w.part(w.pick(("nn.ReLU()", "nn.PReLU()", "nn.GELU()")))
        a = w.let(f"{act}({v})")
        y = w.let(f"{_conv_part(w, a)}({a})" if d else f"{w.part(f'nn.Linear({c}, {w.channels()})')}({a})")
        w.let(f"{act}({y})")
    else:
        bn = w.part(f"nn.BatchNorm{max(d, 1)}d({c})")
        a = w.let(f"{bn}({v})")
        w.let(f"{bn}({w.pick((f'F.relu({a})', f'{v} * 2'))})")


def unread(w: Writer) -> None:
    """Unread heads: plain, grouped, normed, shuffled."""
    v = w.value()
    shape = w.shape(v)
    c, d = shape[1], len(shape) - 2
    if d == 0:
        w.let(f"torch.relu({w.part(f'nn.Linear({c}, {w.channels()})')}({v}))", read=False)
        return
    y = w.let(f"{_conv_part(w, v)}({v})", read=False)
    kind = w.draw.randrange(5)
    n = w.shape(y)[1]
    if kind == 0:
        y = w.let(f"{w.part(f'nn.BatchNorm{d}d({n})')}({y})", read=False)
    elif kind == 1 and n % 2 == 0:
        y = w.let(f"{w.part('nn.ChannelShuffle(2)')}({y})", read=False)
    elif kind == 2:
        y = w.let(f"{y}.chunk(2, 1)", read=False)
        return
    elif kind == 3:
        y = w.let(f"{w.part(f'nn.Linear({n}, 2)')}({y}.mean({tuple(range(2, d + 2))}))", read=False)
        return
    if w.chance(0.5):
        w.let(f"{_conv_part(w, y)}({y})", read=False)


def attention(w: Writer) -> None:
    v = w.image()
    c = w.shape(v)[1]
    t = w.let(f"{v}.flatten(2).transpose(1, 2)")
    d = w.pick((2, 3, 4))
    q, k, u = (w.part(f"nn.Linear({c}, {n})") for n in (d, d, c))
    a = w.let(f"torch.softmax({q}({t}) @ {k}({t}).transpose(-2, -1) * {d} ** -0.5, dim=-1)")
    y = w.let(f"{a} @ {u}({t})")
    if w.chance(0.6):
        w.let(f"{t} + {y}")


def together(w: Writer) -> None:
    """Channels that become pixels, pixels that become channels, new axes."""
    v = w.image()
    shape = w.shape(v)
    kind = w.draw.randrange(4)
    if kind == 0 and len(shape) == 4 and shape[1] % 4 == 0:
        w.let(w.pick((f"F.pixel_shuffle({v}, 2)", f"{w.part('nn.PixelShuffle(2)')}({v})")))
    elif kind == 1 and len(shape) == 4 and shape[2] % 2 == shape[3] % 2 == 0:
        w.let(w.pick((f"F.pixel_unshuffle({v}, 2)", f"{w.part('nn.PixelUnshuffle(2)')}({v})")))
    elif kind == 2 and len(shape) == 4 and min(shape[2:]) > 1:
        w.let(w.pick((f"F.unfold({v}, 2)", f"{w.part('nn.Unfold(2)')}({v})")))
    elif kind == 3:
        other = w.value(same=shape)
        dim = w.pick((1, 2, -1))
        w.let(f"torch.stack([{v}, {other}], {dim}).{w.pick(('mean', 'sum', 'amax'))}({dim})")
    else:
        raise NotFitting


def statistics(w: Writer) -> None:
    """Parts of what max and sort give, quotients, choices, repetitions, statistics over the channels."""
    v = w.image()
    shape = w.shape(v)
    rest = "[:, :" + ", None" * (len(shape) - 2) + "]"
    forms = [
        f"{v}.flatten(2).max(2)[0]{rest} * {v}",
        f"{v}.flatten(2).topk(1)[0].mean(-1){rest} + {v}",
        f"torch.sort({v}, dim=-1)[0]",
        f"{v}.flatten(2).argmax(-1){rest} * {v}",
        f"{v}.logsumexp(-1, keepdim=True) + {v}",
        f"{v} / (1 + {v}.abs().amax(-1, keepdim=True))",
        f"torch.where({v} > 0, {v}, {w.pick((f'0.1 * {v}', '0.0', '0.5'))})",
        f"{v}.masked_fill({v} < 0, {w.pick((0.0, 1.0))})",
        f"{v} * torch.sigmoid({v}.{w.pick(('mean', 'amax', 'sum', 'amin'))}(1, keepdim=True))",
        f"torch.cat([{v}.mean(1, keepdim=True), {v}.amax(1, keepdim=True), {v}], 1)",
        f"{v}.flip({w.pick((1, -1))})",
        f"{v}.repeat_interleave(2, {w.pick((1, 2))})",
        f"{v}.flatten(1).unflatten(1, {shape[1:]})",
        f"{v}.cumsum(-1)",
        f"{v}.select(-1, 0).unsqueeze(-1) + {v}",
        f"torch.movedim({v}, 1, -1).movedim(-1, 1)",
    ]
    if shape[1] % 2 == 0:
        forms += [f"{v}.view(-1, 2, {shape[1] // 2}, *{shape[2:]}).{w.pick(('sum', 'amax', 'mean'))}(1)"] * 3
    w.let(w.pick(forms))


def in_place(w: Writer) -> None:
    v = w.value()
    w.do(
        w.pick(
            (
                f"{v}.relu_()",
                f"{v}.clamp_(min=0)",
                f"{v} *= 0.5",
                f"{v} += 1",
                f"F.relu_({v})",
                f"{v}[:, :1] = 0",
                f"{v}.neg_()",
            )
        )
    )


def matrix_mlp(w: Writer) -> None:
    """Mixing of tokens: a perceptron along the pixels."""
    v = w.image()
    n = math.prod(w.shape(v)[2:])
    a, b = w.part(f"nn.Linear({n}, {w.pick((2, 4))})"), ""
    width = w.space["s"].get_submodule(a[2:]).out_features
    b = w.part(f"nn.Linear({width}, {n})")
    y = w.let(f"{v}.flatten(2)")
    z = w.let(f"{b}(F.gelu({a}({y})))")
    w.let(w.pick((f"{y} + {z}", f"({y} + {z}).reshape({v}.shape)", f"{z}.view_as({v}) + {v}")))


# ---- heads ---------------------------------------------------------------------------------------------------------------


def ensure_layer(w: Writer) -> None:
    v = w.values[0]
    out = w.pick((3, 4, 6, 8))
    w.let(f"{_conv_part(w, v, out, True)}({v})" if w.images else f"{w.part(f'nn.Linear({w.shape(v)[1]}, {out})')}({v})")


def head_conv(w: Writer) -> None:
    v = w.image()
    w.let(f"{w.part(f'nn.Conv{_rank(w, v)}d({w.shape(v)[1]}, {w.pick((1, 2, 3))}, 1)')}({v})")


def head_linear(w: Writer) -> None:
    v = w.value()
    d = _rank(w, v)
    pooled = v if d == 0 else w.let(f"{v}.mean({tuple(range(2, d + 2))})")
    w.let(f"{w.part(f'nn.Linear({w.shape(pooled)[-1]}, 3)')}({pooled})")


def head_flatten(w: Writer) -> None:
    v = w.image()
    y = w.let(w.pick((f"torch.flatten({v}, 1)", f"{v}.reshape({w.batch_of(v)}, -1)")))
    w.let(f"{w.part(f'nn.Linear({w.shape(y)[-1]}, 3)')}({y})")


def head_tokens(w: Writer) -> None:
    v = w.image()
    y = w.let(f"{v}.flatten(2).transpose(1, 2).mean(1)")
    w.let(f"{w.part(f'nn.Linear({w.shape(y)[-1]}, 2)')}({y})")


IMAGE_BLOCKS: list[Callable[[Writer], Any]] = [
    *[conv, conv_block, conv_block, conv_block, activation, activation, norm, broadcast_term, broadcast_term, broadcast_term],
    *[depthwise, transposed, functional_conv, linear, linear_on_channels, einsum, functional_norm, star_relu, number],
    *[narrow_with_wide, join, pool, pool, reduce_, flatten, image_from_vector, shuffle, shuffle, into_batch, permuted, squeeze],
    *[parts_of, parts_of, parts_of, concatenate, concatenate, residual, residual, residual, projection, option_a, gate, gate],
    *[perceptrons_beside_a_stream, perceptrons_beside_a_stream, glu, shared, unread, attention, together],
    *[in_place, matrix_mlp, statistics, statistics, *tokens.BLOCKS],
]
VECTOR_BLOCKS: list[Callable[[Writer], Any]] = [
    *[linear, linear, linear, linear, linear, activation, norm, broadcast_term, broadcast_term, star_relu, number, join],
    *[parts_of, parts_of, concatenate, glu, shared, unread, image_from_vector, squeeze, functional_norm, in_place, conv_block],
    *[narrow_with_wide, shuffle, pool],
]
HEADS = (head_conv, head_linear, head_flatten, head_tokens)
