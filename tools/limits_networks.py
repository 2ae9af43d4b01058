"""The networks of `make limits`: by the library that they come from, each with a small input that it takes.

A name is LIBRARY/NETWORK. Another network of timm, segmentation_models_pytorch or ultralytics is one more word of a list here;
another one of MONAI one more line, one of transformers a line of limits_transformers.py. One network stands for each family,
the smallest that there is: the larger ones repeat its layers, and the whole list has to be tried at every release.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from limits_transformers import TRANSFORMERS, Built
from limits_transformers import random_image as _image
from torch import Tensor, nn

OPS = torch.library.Library("torchvision", "FRAGMENT")  # the ops live as long as this object


def define_operators() -> None:
    """Let torchvision import without its compiled part, which loads beside a CUDA torch only: no network here calls these."""
    for name in ("nms", "qnms"):
        OPS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


TIMM = {  # pixels of a square input: names
    64: (
        "resnet18 resnet26t seresnet18 ecaresnet26t gcresnet33ts resnetrs50 res2net50_26w_4s res2next50 resnetv2_18 "
        "resnetv2_34d legacy_seresnet18 skresnet18 resnest14d dla34 dla46_c hrnet_w18_small densenet121 "
        "dpn48b dpn68 ese_vovnet19b_slim cspdarknet53 darknet17 cs3sedarknet_xdw "
        "ghostnet_050 ghostnetv2_100 repghostnet_050 mobilenetv1_100 mobilenetv3_small_050 "
        "mobilenetv4_conv_small mobileone_s0 repvgg_a0 repvit_m0_9 fastvit_t8 efficientnet_b0 "
        "efficientnet_es tf_efficientnet_b0 mixnet_s hardcorenas_a lcnet_035 semnasnet_050 mobilenet_edgetpu_v2_xs rexnet_100 "
        "selecsls42 tresnet_m xception41 inception_next_atto nf_resnet26 nfnet_f0 eca_nfnet_l0 "
        "convnext_atto convnextv2_atto convmixer_768_32 poolformer_s12 poolformerv2_s12 convformer_s18 caformer_s18 hgnetv2_b0 "
        "starnet_s050 regnetv_040 regnety_002 efficientvit_b0 edgenext_xx_small swiftformer_xs lambda_resnet26t "
        "efficientvim_m1 lowformer_b0 iformer_t pvt_v2_b0 mobilevit_xxs mobilevitv2_050 test_resnet test_byobnet test_nfnet "
        "test_mambaout mambaout_femto resnet50_clip gernet_s regnetz_b16 convnext_zepto_rms fasternet_t0 lcnetv2_small "
        "ghostnetv3_050 mobilenetv5_base efficientvit_l1 cpubone_nano rdnet_tiny csatv2 legacy_xception hgnet_tiny"
    ),
    96: "inception_resnet_v2 inception_v4 nasnetalarge",
    128: "shvit_s1 nextvit_small focalnet_tiny_srf",
    160: "test_vit test_vit2 test_convnext",
    224: (
        "vit_tiny_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224 beit_base_patch16_224 eva02_tiny_patch14_224 "
        "vit_relpos_small_patch16_224 vit_small_resnet26d_224 pit_ti_224 levit_128s levit_conv_128s efficientformer_l1 "
        "efficientformerv2_s0 efficientvit_m0 fastvit_sa12 xcit_nano_12_p16_224 coat_tiny coat_lite_tiny mvitv2_tiny "
        "coatnet_rmlp_nano_rw_224 twins_pcpvt_small twins_svt_small visformer_tiny volo_d1_224 tnt_s_patch16_224 mixer_s32_224 "
        "resmlp_12_224 gmlp_ti16_224 nest_tiny gcvit_xxtiny hiera_tiny_224 davit_tiny "
        "swinv2_cr_tiny_224 cait_xxs24_224 convit_tiny sequencer2d_s tiny_vit_5m_224 vitamin_small_224 "
        "samvit_base_patch16_224 vit_base_patch16_siglip_224 beit3_base_patch16_224 aimv2_large_patch14_224 "
        "vit_small_patch14_dinov2 fastvit_mci0 deepseek_vit_412m"
    ),
    240: "crossvit_9_240 flexivit_small",
    256: (
        "swinv2_tiny_window8_256 eca_botnext26ts_256 mobilenetv4_hybrid_medium vit_small_patch16_dinov3 "
        "vit_wee_patch16_reg1_gap_256 hieradet_small naflexvit_base_patch16_gap naflexvit_base_patch16_map "
        "naflexvit_base_patch16_par_gap vit_pe_core_tiny_patch16_384 "
        "qwen3_vit_88m gemma4_vit_167m sehalonet33ts"
    ),
}
TIMM_SIZES = {name: size for size, names in TIMM.items() for name in names.split()}

_NARROW = {"embed_dim": 192, "depth": 2, "num_heads": 3}
TIMM_OPTIONS: dict[
    str, dict[str, Any]
] = {  # where members differ in width and depth only: as wide as a tiny one, two blocks deep
    "samvit_base_patch16_224": {**_NARROW, "global_attn_indexes": [1]},
    "vit_base_patch16_siglip_224": _NARROW,
    "vit_small_patch14_dinov2": {**_NARROW, "img_size": 224},
    "vit_small_patch16_dinov3": _NARROW,
    "vit_pe_core_tiny_patch16_384": {**_NARROW, "img_size": 256},
    "beit3_base_patch16_224": _NARROW,
    "aimv2_large_patch14_224": _NARROW,
    "naflexvit_base_patch16_gap": _NARROW,
    "naflexvit_base_patch16_map": _NARROW,
    "naflexvit_base_patch16_par_gap": _NARROW,
    "qwen3_vit_88m": _NARROW,
    "gemma4_vit_167m": _NARROW,
    "deepseek_vit_412m": _NARROW,
    "beit_base_patch16_224": _NARROW,
    "flexivit_small": _NARROW,
    "deit3_small_patch16_224": _NARROW,
    "vit_relpos_small_patch16_224": _NARROW,
    "eva02_tiny_patch14_224": _NARROW,
    "cait_xxs24_224": {"depth": 2},
    "xcit_nano_12_p16_224": {"depth": 2},
    "tnt_s_patch16_224": {"depth": 2},
    "hieradet_small": {"stages": (1, 1, 2, 1), "global_att_blocks": (3,)},
    "vit_wee_patch16_reg1_gap_256": _NARROW,
    "nasnetalarge": {"num_features": 1056, "stem_size": 24},
    "mobilenetv5_base": {"channel_multiplier": 0.25},
}

YOLO = (
    "yolov8n yolov8n-seg yolov8n-pose yolov8n-cls yolov8n-obb yolov5n yolov9t yolov10n yolo11n yolo11n-seg yolo11n-pose "
    "yolo11n-cls yolo12n yolo12n-seg yolo26n yolo26n-seg yolo26n-pose yolo26n-obb yolo26n-cls yolo26n-sem rtdetr-l"
)

SMP = (
    "Unet:resnet18 UnetPlusPlus:resnet18 FPN:resnet18 Linknet:resnet18 PSPNet:resnet18 DeepLabV3:resnet18 "
    "DeepLabV3Plus:resnet18 PAN:resnet18 MAnet:resnet18 UPerNet:resnet18 Segformer:mit_b0 Unet:mobilenet_v2 "
    "Unet:efficientnet-b0 Unet:vgg11_bn Unet:densenet121 FPN:timm-regnety_002 Unet:tu-convnext_atto "
    "DPT:tu-vit_tiny_patch16_224 Segformer:resnet18 UPerNet:mit_b0 Unet:mobileone_s0 Unet:tu-mambaout_femto"
)

SMP_SIZES = {"PAN": 128, "DPT": 224}
SMP_OPTIONS = {"DPT": {"decoder_fusion_channels": 32, "decoder_intermediate_channels": (16, 24, 32, 48)}}


def _timm(name: str) -> Built:
    import timm

    return timm.create_model(name, pretrained=False, **TIMM_OPTIONS.get(name, {})), _image(TIMM_SIZES[name])


def _yolo(name: str) -> Built:
    from ultralytics import YOLO as Yolo

    return Yolo(f"{name}.yaml", verbose=False).model, _image(64)


def _smp(name: str) -> Built:
    import segmentation_models_pytorch as smp

    kind, _, encoder = name.partition(":")
    options = {"encoder_name": encoder, "encoder_weights": None, "classes": 3, **SMP_OPTIONS.get(kind, {})}
    return getattr(smp, kind)(**options), _image(SMP_SIZES.get(kind, 64))


TORCHVISION = (  # of every family that it has, the smallest or the one that people use most
    "alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5 "
    "mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnet50 resnext50_32x4d "
    "shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vgg11_bn vit_b_16"
)
TORCHVISION_SIZES = {"maxvit_t": 224, "inception_v3": 96, "googlenet": 96}  # the others: 64
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "swin3d_t")
SEGMENTATION = ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
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
        clip = torch.randn(2, 3, 8, 64, 64, generator=torch.Generator().manual_seed(1))
        return getattr(models.video, name)(**options), clip
    if name in SEGMENTATION:
        return getattr(models.segmentation, name)(weights_backbone=None, **options), _image(64)
    if name in DETECTION:
        return _BackboneAndHead(getattr(models.detection, name)(weights_backbone=None, **options)), _image(64)
    size = TORCHVISION_SIZES.get(name, 64)
    if name in ("inception_v3", "googlenet"):
        options["init_weights"] = False  # their own takes minutes
    if name.startswith("vit"):
        options["image_size"] = size
    return models.get_model(name, **options), _image(size)


def _monai(kind: str, example: Callable[[], Any], *values: Any, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        from monai.networks import nets

        return getattr(nets, kind)(*values, **options), example()

    return build


def _scan() -> Tensor:
    return _image(64, 1)


def _volume() -> Tensor:
    return _image(32, 1, 3)


_UNET = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (8, 16, 32), "strides": (2, 2)}
_FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_LATENT = {
    "channels": (16, 32),
    "attention_levels": (False, True),
    "num_res_blocks": 1,
    "norm_num_groups": 8,
}

MONAI: dict[str, Callable[[], Built]] = {
    "UNet": _monai("UNet", _scan, **_UNET),
    "UNet with residual units": _monai("UNet", _scan, num_res_units=2, **_UNET),
    "UNet with BatchNorm": _monai("UNet", _scan, num_res_units=2, norm="batch", **_UNET),
    "BasicUNet": _monai("BasicUNet", _scan, **_FLAT),
    "AttentionUnet": _monai("AttentionUnet", _scan, **_UNET),
    "DynUNet": _monai("DynUNet", _scan, **_FLAT, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2]),
    "SegResNet": _monai("SegResNet", _scan, **_FLAT),
    "VNet": _monai("VNet", _scan, **_FLAT),
    "HighResNet": _monai("HighResNet", _scan, **_FLAT),
    "DenseNet121": _monai("DenseNet121", _scan, **_FLAT),
    "UNETR": _monai("UNETR", _scan, **_FLAT, img_size=64, hidden_size=48, mlp_dim=96, num_heads=4),
    "SwinUNETR": _monai("SwinUNETR", _scan, **_FLAT, feature_size=12),
    "BasicUNetPlusPlus": _monai("BasicUNetPlusPlus", _scan, **_FLAT, features=(8, 8, 16, 32, 64, 8)),
    "FlexibleUNet": _monai("FlexibleUNet", lambda: _image(64), in_channels=3, out_channels=2, backbone="efficientnet-b0"),
    "MedNeXt": _monai("MedNeXt", _scan, **_FLAT, init_filters=8, encoder_expansion_ratio=2),
    "SegResNetDS": _monai("SegResNetDS", _scan, **_FLAT, init_filters=8),
    "SwinUNETR v2": _monai("SwinUNETR", _scan, **_FLAT, feature_size=12, use_v2=True),
    "ViT": _monai("ViT", _scan, 1, (64, 64), (16, 16), 48, 96, 2, 4, classification=True, spatial_dims=2),
    "EfficientNetBN": _monai("EfficientNetBN", _scan, "efficientnet-b0", pretrained=False, spatial_dims=2, in_channels=1),
    "SEResNet50": _monai("SEResNet50", _scan, spatial_dims=2, in_channels=1, num_classes=3),
    "ResNet in 3-D": _monai(
        "ResNet", _volume, "basic", [1, 1, 1, 1], [8, 16, 32, 64], n_input_channels=1, num_classes=3, spatial_dims=3
    ),
    "AutoEncoder": _monai("AutoEncoder", _scan, **{**_UNET, "strides": (2, 2, 2)}),
    "AutoencoderKL": _monai("AutoencoderKL", _scan, **_FLAT, **_LATENT, latent_channels=3),
    "DiffusionModelUNet": _monai(
        "DiffusionModelUNet",
        lambda: {"x": _scan(), "timesteps": torch.tensor([3.0, 7.0])},
        **_FLAT,
        **_LATENT,
        num_head_channels=8,
    ),
    "VoxelMorphUNet": _monai(
        "VoxelMorphUNet",
        lambda: _image(64, 2),
        spatial_dims=2,
        in_channels=2,
        unet_out_channels=8,
        channels=(8, 8, 16, 16, 16, 16),
        final_conv_channels=(8, 8),
    ),
    "UNet in 3-D": _monai("UNet", _volume, **{**_UNET, "spatial_dims": 3}),
}


def names() -> list[str]:
    """All networks, in the order of the page."""
    torchvision = [*TORCHVISION.split(), *SEGMENTATION, *VIDEO, *DETECTION]
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
