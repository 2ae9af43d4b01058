"""The networks of `make limits`: by the library that they come from, each with a small input that it takes.

A name is LIBRARY/NETWORK. Another network of timm, segmentation_models_pytorch or ultralytics is one more word of a list here;
another one of transformers, MONAI or torchvision's detection one more line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, Any]  # a network with its library's own initialisation, and an example for trace

OPS = torch.library.Library("torchvision", "FRAGMENT")  # the ops live as long as this object


def define_operators() -> None:
    """Let torchvision import without its compiled part, which loads beside a CUDA torch only: no network here calls these."""
    for name in ("nms", "qnms"):
        OPS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


TIMM = {  # pixels of a square input: names
    64: (
        "resnet18 resnet26d resnet26t seresnet18 ecaresnet26t gcresnet33ts resnetrs50 res2net50_26w_4s res2next50 resnetv2_18 "
        "resnetv2_34d senet154 legacy_seresnet18 skresnet18 resnest14d dla34 dla46_c dla60_res2net hrnet_w18_small densenet121 "
        "densenetblur121d dpn48b dpn68 vovnet39a ese_vovnet19b_slim cspresnext50 cspdarknet53 darknet17 cs3sedarknet_xdw "
        "ghostnet_050 ghostnet_100 ghostnetv2_100 repghostnet_050 mobilenetv1_100 mobilenetv3_small_050 "
        "mobilenetv4_conv_small mobilenetv4_conv_aa_medium mobileone_s0 repvgg_a0 repvit_m0_9 fastvit_t8 efficientnet_b0 "
        "efficientnet_es tf_efficientnet_b0 mixnet_s hardcorenas_a lcnet_035 semnasnet_050 mobilenet_edgetpu_v2_xs rexnet_100 "
        "selecsls42 tresnet_m xception41 xception41p inception_next_atto nf_resnet26 nfnet_f0 eca_nfnet_l0 "
        "convnext_atto convnextv2_atto convmixer_768_32 poolformer_s12 poolformerv2_s12 convformer_s18 caformer_s18 hgnetv2_b0 "
        "starnet_s050 regnetv_040 regnety_002 efficientvit_b0 edgenext_xx_small swiftformer_xs lambda_resnet26t sehalonet33ts "
        "efficientvim_m1 lowformer_b0 iformer_t pvt_v2_b0 mobilevit_xxs mobilevitv2_050 test_resnet test_byobnet test_nfnet "
        "test_mambaout"
    ),
    96: "inception_v4 nasnetalarge pnasnet5large",
    128: "shvit_s1 nextvit_small focalnet_tiny_srf",
    160: "test_vit test_vit2 test_convnext",
    224: (
        "vit_tiny_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224 beit_base_patch16_224 eva02_tiny_patch14_224 "
        "vit_relpos_small_patch16_224 vit_small_resnet26d_224 pit_ti_224 levit_128s levit_conv_128s efficientformer_l1 "
        "efficientformerv2_s0 efficientvit_m0 fastvit_sa12 xcit_nano_12_p16_224 coat_tiny coat_lite_tiny mvitv2_tiny "
        "coatnet_rmlp_nano_rw_224 twins_pcpvt_small twins_svt_small visformer_tiny volo_d1_224 tnt_s_patch16_224 mixer_s32_224 "
        "resmlp_12_224 gmlp_ti16_224 nest_tiny gcvit_xxtiny hiera_tiny_224 davit_tiny swin_tiny_patch4_window7_224 "
        "swinv2_cr_tiny_224 cait_xxs24_224 convit_tiny sequencer2d_s crossvit_9_240"
    ),
    256: "swinv2_tiny_window8_256 eca_botnext26ts_256 mobilenetv4_hybrid_medium",
}
TIMM_SIZES = {name: size for size, names in TIMM.items() for name in names.split()}
TIMM_SIZES["crossvit_9_240"] = 240

YOLO = (
    "yolov8n yolov8n-seg yolov8n-pose yolov8n-cls yolov8n-obb yolov5n yolov9t yolov10n yolo11n yolo11n-seg yolo11n-pose "
    "yolo11n-cls yolo12n rtdetr-l"
)

SMP = (
    "Unet:resnet18 UnetPlusPlus:resnet18 FPN:resnet18 Linknet:resnet18 PSPNet:resnet18 DeepLabV3:resnet18 "
    "DeepLabV3Plus:resnet18 PAN:resnet18 MAnet:resnet18 UPerNet:resnet18 Segformer:mit_b0 Unet:mobilenet_v2 "
    "Unet:efficientnet-b0 Unet:vgg11_bn Unet:densenet121 FPN:timm-regnety_002 Unet:tu-convnext_atto"
)


def _image(size: int, channels: int = 3, dimensions: int = 2) -> Tensor:
    return torch.randn(2, channels, *[size] * dimensions, generator=torch.Generator().manual_seed(1))


def _timm(name: str) -> Built:
    import timm

    return timm.create_model(name, pretrained=False), _image(TIMM_SIZES[name])


def _yolo(name: str) -> Built:
    from ultralytics import YOLO as Yolo

    return Yolo(f"{name}.yaml", verbose=False).model, _image(64)


def _smp(name: str) -> Built:
    import segmentation_models_pytorch as smp

    kind, _, encoder = name.partition(":")
    return getattr(smp, kind)(encoder_name=encoder, encoder_weights=None, classes=3), _image(128 if kind == "PAN" else 64)


TORCHVISION: dict[str, int] = {"maxvit_t": 224, "inception_v3": 96, "googlenet": 96, "vit_h_14": 56}  # the others: 64
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "swin3d_t", "mvit_v1_b")
SEGMENTATION = ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
DETECTION = ("retinanet_resnet50_fpn", "fcos_resnet50_fpn", "ssdlite320_mobilenet_v3_large", "fasterrcnn_resnet50_fpn")


class _BackboneAndHead(nn.Module):
    """What can be captured of a detector of torchvision: all but the boxes that it selects by their values."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.backbone = detector.backbone
        self.head = detector.head if hasattr(detector, "head") else detector.rpn.head

    def forward(self, x: Tensor) -> Any:
        """The head's outputs for all levels."""
        return self.head(list(self.backbone(x).values()))


def _torchvision(name: str) -> Built:
    from torchvision import models

    options: dict[str, Any] = {"weights": None}
    if name in VIDEO:
        frames, size = {"mvit_v1_b": (16, 224), "s3d": (16, 64)}.get(name, (8, 64))
        clip = torch.randn(2 if size == 64 else 1, 3, frames, size, size, generator=torch.Generator().manual_seed(1))
        return getattr(models.video, name)(**options), clip
    if name in SEGMENTATION:
        return getattr(models.segmentation, name)(weights_backbone=None, **options), _image(64)
    if name in DETECTION:
        return _BackboneAndHead(getattr(models.detection, name)(weights_backbone=None, **options)), _image(64)
    size = TORCHVISION.get(name, 64)
    if name in ("inception_v3", "googlenet"):
        options["init_weights"] = False  # their own takes minutes
    if name.startswith("vit"):
        options["image_size"] = size
    return models.get_model(name, **options), _image(size)


def _of(kind: str, example: Callable[[], dict[str, Any]], **options: Any) -> Callable[[], Built]:
    """Return a builder of a network of transformers from a small configuration; `kind` is the class of the model."""

    def build() -> Built:
        import transformers

        model = getattr(transformers, kind)
        return model(model.config_class(**options)), example()

    return build


def _pixels(size: int, channels: int = 3) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": _image(size, channels)}


def _tokens() -> dict[str, Any]:
    return {"input_ids": torch.arange(16).view(2, 8) * 5 % 90}


_SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_TEXT = {**_SMALL, "vocab_size": 100, "max_position_embeddings": 32}
_STAGES = {"hidden_sizes": [16, 32], "depths": [1, 2]}
_GPT = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 100, "use_cache": False}

TRANSFORMERS: dict[str, Callable[[], Built]] = {
    "ResNet": _of("ResNetForImageClassification", _pixels(64)),
    "RegNet": _of("RegNetForImageClassification", _pixels(64)),
    "ConvNext": _of("ConvNextForImageClassification", _pixels(64)),
    "ConvNextV2": _of("ConvNextV2ForImageClassification", _pixels(64)),
    "MobileNetV1": _of("MobileNetV1ForImageClassification", _pixels(64)),
    "MobileNetV2": _of("MobileNetV2ForImageClassification", _pixels(64)),
    "MobileViT": _of("MobileViTForImageClassification", _pixels(64)),
    "MobileViTV2": _of("MobileViTV2ForImageClassification", _pixels(64)),
    "EfficientNet": _of(
        "EfficientNetForImageClassification", _pixels(64), image_size=64, width_coefficient=0.5, hidden_dim=640
    ),
    "Bit": _of("BitForImageClassification", _pixels(64)),
    "PoolFormer": _of("PoolFormerForImageClassification", _pixels(64)),
    "LeViT": _of("LevitForImageClassification", _pixels(224)),
    "CvT": _of("CvtForImageClassification", _pixels(64)),
    "PVT": _of("PvtForImageClassification", _pixels(64), image_size=64),
    "FocalNet": _of("FocalNetForImageClassification", _pixels(64), image_size=64),
    "Swin": _of("SwinForImageClassification", _pixels(128), image_size=128, window_size=4),
    "Swinv2": _of("Swinv2ForImageClassification", _pixels(128), image_size=128, window_size=4),
    "ViT": _of("ViTForImageClassification", _pixels(64), image_size=64, **_SMALL),
    "DeiT": _of("DeiTForImageClassification", _pixels(64), image_size=64, **_SMALL),
    "BEiT": _of("BeitForImageClassification", _pixels(64), image_size=64, **_SMALL),
    "DINOv2": _of("Dinov2ForImageClassification", _pixels(56), image_size=56, **_SMALL),
    "CLIP vision": _of("CLIPVisionModel", _pixels(64), image_size=64, patch_size=16, **_SMALL),
    "SigLIP vision": _of("SiglipVisionModel", _pixels(64), image_size=64, patch_size=16, **_SMALL),
    "ViTMAE": _of("ViTMAEModel", _pixels(64), image_size=64, mask_ratio=0.0, **_SMALL),
    "SegFormer": _of("SegformerForSemanticSegmentation", _pixels(64)),
    "GLPN": _of("GLPNForDepthEstimation", _pixels(64)),
    "UperNet": _of("UperNetForSemanticSegmentation", _pixels(64)),
    "DETR": _of(
        "DetrForObjectDetection",
        _pixels(64),
        use_pretrained_backbone=False,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_queries=10,
    ),
    "YOLOS": _of("YolosForObjectDetection", _pixels(64), image_size=[64, 64], num_detection_tokens=10, **_SMALL),
    "BERT": _of("BertForSequenceClassification", _tokens, **_TEXT),
    "RoBERTa": _of("RobertaForSequenceClassification", _tokens, **_TEXT),
    "DistilBERT": _of(
        "DistilBertForSequenceClassification", _tokens, dim=48, n_layers=2, n_heads=4, hidden_dim=96, vocab_size=100
    ),
    "ELECTRA": _of("ElectraForSequenceClassification", _tokens, embedding_size=48, **_TEXT),
    "ALBERT": _of("AlbertForSequenceClassification", _tokens, embedding_size=32, **_TEXT),
    "ConvBERT": _of("ConvBertForSequenceClassification", _tokens, embedding_size=48, **_TEXT),
    "GPT-2": _of("GPT2ForSequenceClassification", _tokens, pad_token_id=0, **_GPT),
    "Whisper encoder": lambda: _whisper(),
    "Wav2Vec2": _of(
        "Wav2Vec2ForSequenceClassification",
        lambda: {"input_values": torch.randn(2, 4000)},
        **_SMALL,
        mask_time_prob=0.0,
        mask_feature_prob=0.0,
    ),
}


def _whisper() -> Built:
    import transformers

    small = {"d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "vocab_size": 100}
    whole = transformers.WhisperModel(
        transformers.WhisperConfig(**small, decoder_layers=1, decoder_start_token_id=1, pad_token_id=0)
    )
    return whole.encoder, {"input_features": torch.randn(2, 80, 3000)}


def _monai(kind: str, example: Callable[[], Any], **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        from monai.networks import nets

        return getattr(nets, kind)(**options), example()

    return build


_SCAN: Callable[[], Tensor] = lambda: _image(64, 1)  # noqa: E731  (an image of one channel, used below)
_UNET = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (8, 16, 32), "strides": (2, 2)}
_FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}

MONAI: dict[str, Callable[[], Built]] = {
    "UNet": _monai("UNet", _SCAN, **_UNET),
    "UNet with residual units": _monai("UNet", _SCAN, num_res_units=2, **_UNET),
    "UNet with BatchNorm": _monai("UNet", _SCAN, num_res_units=2, norm="batch", **_UNET),
    "BasicUNet": _monai("BasicUNet", _SCAN, **_FLAT),
    "AttentionUnet": _monai("AttentionUnet", _SCAN, **_UNET),
    "DynUNet": _monai("DynUNet", _SCAN, **_FLAT, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2]),
    "SegResNet": _monai("SegResNet", _SCAN, **_FLAT),
    "VNet": _monai("VNet", _SCAN, **_FLAT),
    "HighResNet": _monai("HighResNet", _SCAN, **_FLAT),
    "DenseNet121": _monai("DenseNet121", _SCAN, **_FLAT),
    "UNETR": _monai("UNETR", _SCAN, **_FLAT, img_size=64, hidden_size=48, mlp_dim=96, num_heads=4),
    "SwinUNETR": _monai("SwinUNETR", _SCAN, **_FLAT, feature_size=12),
    "UNet in 3-D": _monai("UNet", lambda: _image(32, 1, 3), **{**_UNET, "spatial_dims": 3}),
}


def names() -> list[str]:
    """All networks, in the order of the page."""
    from torchvision import models

    torchvision = [*models.list_models(module=models), *SEGMENTATION, *VIDEO, *DETECTION]
    lists = {"torchvision": torchvision, "timm": TIMM_SIZES, "ultralytics": YOLO.split(), "transformers": TRANSFORMERS}
    lists |= {"segmentation_models_pytorch": SMP.split(), "monai": MONAI}
    return [f"{library}/{name}" for library, found in lists.items() for name in found]


FIRST = (  # networks that people ask for first
    "torchvision/resnet50 ultralytics/yolov8n ultralytics/yolo11n timm/vit_tiny_patch16_224 transformers/ResNet "
    "transformers/ConvNext transformers/ViT transformers/SegFormer transformers/DETR torchvision/retinanet_resnet50_fpn "
    "torchvision/fasterrcnn_resnet50_fpn monai/UNet segmentation_models_pytorch/Unet:resnet18 torchvision/mobilenet_v2 "
    "torchvision/efficientnet_b0 torchvision/densenet121 torchvision/vit_b_16 torchvision/swin_t torchvision/convnext_tiny "
    "ultralytics/yolov8n-seg ultralytics/yolov8n-pose ultralytics/yolo11n-seg ultralytics/yolo11n-pose"
)


def by_importance() -> list[str]:
    """All networks: those of `FIRST`, then one of each library in turn, so that a run that is cut short has seen them all."""
    rest: dict[str, list[str]] = {}
    for name in names():
        if name not in FIRST.split():
            rest.setdefault(name.partition("/")[0], []).append(name)
    share = {name: (place + 1) / len(found) for found in rest.values() for place, name in enumerate(found)}
    return [*FIRST.split(), *sorted(share, key=share.__getitem__)]


def build(name: str) -> Built:
    """The network and its example."""
    library, _, short = name.partition("/")
    one: dict[str, Callable[[str], Built]] = {"torchvision": _torchvision, "timm": _timm, "ultralytics": _yolo}
    one |= {"segmentation_models_pytorch": _smp}
    return one[library](short) if library in one else {"transformers": TRANSFORMERS, "monai": MONAI}[library][short]()
