"""The networks of transformers for `make limits`, each from a small configuration, with a small input that it takes.

They have the layers of the networks that people know by these names, fewer and narrower; nothing is downloaded. Another
one is one more line of the table at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, Any]  # a network with its library's own initialisation, and an example for trace


def random_image(size: int, channels: int = 3, dimensions: int = 2) -> Tensor:
    """Two images (or scans) of random pixels, the same at every call."""
    return torch.randn(2, channels, *[size] * dimensions, generator=torch.Generator().manual_seed(1))


def _of(kind: str, example: Callable[[], dict[str, Any]], **options: Any) -> Callable[[], Built]:
    """Return a builder of a network of transformers from a small configuration; `kind` is the class of the model."""

    def build() -> Built:
        import transformers

        model = getattr(transformers, kind)
        return model(model.config_class(**options)), example()

    return build


def _decoder(kind: str, **options: Any) -> Callable[[], Built]:
    """Return a builder of a small language model that is read without a cache of keys and values."""
    return _of(kind, _tokens, **{**_TEXT, **_CAUSAL, **options})


def _mixture(kind: str, **options: Any) -> Callable[[], Built]:
    """Return a builder of a small language model with experts, of which each token reads two.

    The weights of its experts are gathered token by token: the ways that are faster take no float64, or a path that depends on
    the values.
    """

    def build() -> Built:
        model, example = _decoder(kind, num_experts_per_tok=2, **_HEADS_OF_12, **options)()
        model.set_experts_implementation("batched_mm")
        return model, example

    return build


def _pixels(size: int, channels: int = 3) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": random_image(size, channels)}


def _video(frames: int, size: int, name: str = "pixel_values") -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.stack([random_image(size) for _ in range(frames)], 1)}


def _tokens() -> dict[str, Any]:
    return {"input_ids": torch.arange(16).view(2, 8) * 5 % 90}


def _pairs(size: int) -> Callable[[], dict[str, Any]]:
    """Texts and images."""
    return lambda: {**_tokens(), **_pixels(size)()}


def _translation() -> dict[str, Any]:
    """What an encoder reads and what its decoder has written so far."""
    return {**_tokens(), "decoder_input_ids": torch.arange(10).view(2, 5) * 7 % 90}


_SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_TEXT = {**_SMALL, "vocab_size": 100, "max_position_embeddings": 32}
_CAUSAL = {"num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_HEADS_OF_12 = {"head_dim": 12}  # these would be 128 or 256 wide, whatever the network's width
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_GPT = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 100, "use_cache": False}
_STATE_SPACE = {"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 100, "state_size": 8, "use_cache": False}
_TWO_TOWERS = {"text_config": {**_TEXT, "eos_token_id": 2}, "vision_config": {**_SMALL, "image_size": 64, "patch_size": 16}}
_FOUR_DEPTHS = {
    "model_type": "dinov2",
    **{**_SMALL, "num_hidden_layers": 4},
    "image_size": 56,
    "out_indices": [1, 2, 3, 4],
    "reshape_hidden_states": False,
}
_DETR = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_queries": 10,
}
_REAL_TIME_DETR = {
    **{**_DETR, "encoder_layers": 1},
    "encoder_hidden_dim": 64,
    "encoder_in_channels": [32, 48, 64],
    "decoder_in_channels": [64, 64, 64],
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_denoising": 0,
    "anchor_image_size": [64, 64],
}
_RESNET_OF_DETR = {
    "model_type": "rt_detr_resnet",
    "embedding_size": 16,
    "hidden_sizes": [24, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}
_HGNET_OF_DETR = {
    "model_type": "hgnet_v2",
    "stem_channels": [3, 8, 16],
    "stage_in_channels": [16, 24, 32, 48],
    "stage_mid_channels": [8, 12, 16, 24],
    "stage_out_channels": [24, 32, 48, 64],
    "hidden_sizes": [24, 32, 48, 64],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [2, 2, 2, 2],
    "initializer_range": 0.2,  # of its own 0.02, so little would be left behind narrow layers that BatchNorm magnifies rounding
    "out_features": ["stage2", "stage3", "stage4"],
}
_SWIN_OF_MASKS = {
    "model_type": "swin",
    "image_size": 64,
    "embed_dim": 16,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 2, 4],
    "window_size": 2,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_SAM_ENCODER = {"image_size": 64, "patch_size": 8, "window_size": 4, "global_attn_indexes": [1], "output_channels": 32}
_HIERA = {"embed_dim": 24, "image_size": [64, 64], "num_heads": [1, 2, 2, 4]}
_SAM2_BACKBONE = {
    "model_type": "sam2_hiera_det_model",
    "hidden_size": 16,
    "image_size": [128, 128],
    "blocks_per_stage": [1, 1, 2, 1],
    "embed_dim_per_stage": [16, 32, 64, 128],
    "num_attention_heads_per_stage": [1, 2, 4, 8],
    "window_size_per_stage": [8, 4, 4, 2],
    "global_attention_blocks": [3],
    "window_positional_embedding_background_size": [4, 4],
}
_SAM2_ENCODER = {
    "backbone_config": _SAM2_BACKBONE,
    "backbone_channel_list": [128, 64, 32, 16],
    "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
    "fpn_hidden_size": 32,
}


class _ImageOnly(nn.Module):
    """A network of which only images are an input: where to segment, for example, is always the same."""

    def __init__(self, whole: nn.Module, prompts: dict[str, Tensor]) -> None:
        super().__init__()
        self.whole = whole
        self.names = list(prompts)
        for name, prompt in prompts.items():
            self.register_buffer(name, prompt)

    def forward(self, pixel_values: Tensor) -> Any:
        """What the network says to these images and the prompts."""
        return self.whole(pixel_values, **{name: getattr(self, name) for name in self.names})


def _prompted(builder: Callable[[], Built], **prompts: Tensor) -> Callable[[], Built]:
    def build() -> Built:
        model, example = builder()
        return _ImageOnly(model, prompts), example

    return build


def _whisper() -> Built:
    import transformers

    small = {"d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "vocab_size": 100}
    whole = transformers.WhisperModel(
        transformers.WhisperConfig(**small, decoder_layers=1, decoder_start_token_id=1, pad_token_id=0)
    )
    return whole.encoder, {"input_features": torch.randn(2, 80, 3000)}


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
    "DETR": _of("DetrForObjectDetection", _pixels(64), use_pretrained_backbone=False, **_DETR),
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
    "Whisper encoder": _whisper,
    "Wav2Vec2": _of(
        "Wav2Vec2ForSequenceClassification",
        lambda: {"input_values": torch.randn(2, 4000)},
        **_SMALL,
        mask_time_prob=0.0,
        mask_feature_prob=0.0,
    ),
    "Wav2Vec2-BERT": _of(
        "Wav2Vec2BertForSequenceClassification", lambda: {"input_features": torch.randn(2, 20, 160)}, **_SMALL
    ),
    "HuBERT": _of(
        "HubertForSequenceClassification",
        lambda: {"input_values": torch.randn(2, 4000)},
        **_SMALL,
        mask_time_prob=0.0,
        mask_feature_prob=0.0,
    ),
    "AST": _of(
        "ASTForAudioClassification", lambda: {"input_values": torch.randn(2, 64, 32)}, max_length=64, num_mel_bins=32, **_SMALL
    ),
    "ModernBERT": _of(
        "ModernBertForSequenceClassification",
        _tokens,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=1,
        cls_token_id=1,
        sep_token_id=2,
        **_TEXT,
    ),
    "DeBERTa-v2": _of(
        "DebertaV2ForSequenceClassification", _tokens, relative_attention=True, pos_att_type=["p2c", "c2p"], **_TEXT
    ),
    "T5": _of(
        "T5Model", _translation, vocab_size=100, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, use_cache=False
    ),
    "BART": _of(
        "BartModel",
        _translation,
        vocab_size=100,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        use_cache=False,
    ),
    "GPT-2 as a language model": _of("GPT2LMHeadModel", _tokens, pad_token_id=0, **_GPT),
    "GPT-NeoX": _decoder("GPTNeoXForCausalLM"),
    "Llama": _decoder("LlamaForCausalLM"),
    "Mistral": _decoder("MistralForCausalLM", **_HEADS_OF_12),
    "Qwen2": _decoder("Qwen2ForCausalLM"),
    "Qwen3": _decoder("Qwen3ForCausalLM", **_HEADS_OF_12),
    "Qwen3-MoE": _mixture("Qwen3MoeForCausalLM", num_experts=4, moe_intermediate_size=32),
    "Gemma3": _decoder("Gemma3ForCausalLM", **_HEADS_OF_12, sliding_window=4),
    "SmolLM3": _decoder("SmolLM3ForCausalLM"),
    "Phi3": _decoder("Phi3ForCausalLM"),
    "OLMo3": _decoder("Olmo3ForCausalLM", sliding_window=4),
    "Granite": _decoder("GraniteForCausalLM"),
    "Cohere2": _decoder("Cohere2ForCausalLM", sliding_window=4),
    "Ministral": _decoder("MinistralForCausalLM", **_HEADS_OF_12, sliding_window=4),
    "GPT-OSS": _mixture("GptOssForCausalLM", num_local_experts=4, sliding_window=4, rope_parameters=_ROTARY),
    "LFM2": _decoder("Lfm2ForCausalLM", layer_types=["conv", "full_attention"]),
    "Mamba": _of("MambaForCausalLM", _tokens, **_STATE_SPACE),
    "Mamba2": _of("Mamba2ForCausalLM", _tokens, num_heads=8, head_dim=12, n_groups=1, chunk_size=8, **_STATE_SPACE),
    "CLIP": _of("CLIPModel", _pairs(64), projection_dim=32, **_TWO_TOWERS),
    "SigLIP": _of("SiglipModel", _pairs(64), **_TWO_TOWERS),
    "SigLIP2 vision": _prompted(
        _of("Siglip2VisionModel", lambda: {"pixel_values": torch.randn(2, 16, 192)}, patch_size=8, num_patches=16, **_SMALL),
        pixel_attention_mask=torch.ones(2, 16, dtype=torch.long),
        spatial_shapes=torch.tensor([[4, 4], [4, 4]]),
    ),
    "AIMv2 vision": _of("Aimv2VisionModel", _pixels(64), image_size=64, patch_size=16, **_SMALL),
    "I-JEPA": _of("IJepaForImageClassification", _pixels(64), image_size=64, **_SMALL),
    "V-JEPA 2": _of(
        "VJEPA2Model",
        _video(4, 64, "pixel_values_videos"),
        crop_size=64,
        frames_per_clip=4,
        pred_hidden_size=48,
        pred_num_attention_heads=4,
        pred_num_hidden_layers=2,
        **_SMALL,
    ),
    "VideoMAE": _of("VideoMAEForVideoClassification", _video(4, 64), image_size=64, num_frames=4, **_SMALL),
    "DINOv2 with registers": _of("Dinov2WithRegistersForImageClassification", _pixels(56), image_size=56, **_SMALL),
    "DINOv3": _of("DINOv3ViTModel", _pixels(64), image_size=64, num_register_tokens=4, **_SMALL),
    "DINOv3 ConvNeXt": _of("DINOv3ConvNextModel", _pixels(64), hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1]),
    "Hiera": _of("HieraForImageClassification", _pixels(64), depths=[1, 1, 1, 1], **_HIERA),
    "PVTv2": _of("PvtV2ForImageClassification", _pixels(64), image_size=64, depths=[1, 1, 1, 1]),
    "SwiftFormer": _of("SwiftFormerForImageClassification", _pixels(64), image_size=64, depths=[1, 1, 1, 1]),
    "HGNetV2": _of("HGNetV2ForImageClassification", _pixels(64)),
    "TextNet": _of(
        "TextNetForImageClassification",
        _pixels(64),
        image_size=[64, 64],
        stem_out_channels=16,
        conv_layer_kernel_sizes=[[[3, 3]], [[3, 3], [3, 1]], [[1, 3]], [[3, 3]]],
        conv_layer_strides=[[2], [2, 1], [2], [2]],
        hidden_sizes=[16, 16, 24, 32, 48],
    ),
    "ViTPose": _of(
        "VitPoseForPoseEstimation",
        lambda: {"pixel_values": random_image(64)[..., :48]},
        backbone_config={"model_type": "vitpose_backbone", "image_size": [64, 48], **_SMALL},
    ),
    "Depth-Anything": _of(
        "DepthAnythingForDepthEstimation",
        _pixels(56),
        backbone_config=_FOUR_DEPTHS,
        depth_estimation_type="metric",  # a sigmoid at the end: the other ends in a ReLU, which is 0 for random weights
        reassemble_hidden_size=48,
        neck_hidden_sizes=[12, 24, 36, 48],
        fusion_hidden_size=16,
        head_hidden_size=8,
    ),
    "DPT": _of(
        "DPTForSemanticSegmentation",
        _pixels(64),
        image_size=64,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[12, 24, 36, 48],
        fusion_hidden_size=16,
        **{**_SMALL, "num_hidden_layers": 4},
    ),
    "Mask2Former": _of(
        "Mask2FormerForUniversalSegmentation",
        _pixels(64),
        backbone_config=_SWIN_OF_MASKS,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=64,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=4,
        dim_feedforward=64,
        num_queries=10,
    ),
    "EoMT": _of("EomtForUniversalSegmentation", _pixels(64), image_size=64, num_blocks=1, num_queries=10, **_SMALL),
    "RT-DETR": _of("RTDetrForObjectDetection", _pixels(64), backbone_config=_RESNET_OF_DETR, **_REAL_TIME_DETR),
    "RT-DETRv2": _of("RTDetrV2ForObjectDetection", _pixels(64), backbone_config=_RESNET_OF_DETR, **_REAL_TIME_DETR),
    "D-FINE": _of("DFineForObjectDetection", _pixels(64), backbone_config=_HGNET_OF_DETR, **_REAL_TIME_DETR),
    "RF-DETR": _of(
        "RfDetrForObjectDetection",
        _pixels(56),
        backbone_config={**_FOUR_DEPTHS, "model_type": "rf_detr_dinov2", "num_windows": 2, "reshape_hidden_states": True},
        d_model=64,
        num_queries=10,
        decoder_layers=2,
        decoder_ffn_dim=96,
        decoder_self_attention_heads=4,
        decoder_cross_attention_heads=4,
        group_detr=1,
    ),
    "SAM vision": _of("SamVisionModel", _pixels(64), **_SAM_ENCODER, **_SMALL),
    "SAM2 vision": _of("Sam2VisionModel", _pixels(128), **_SAM2_ENCODER),
    "SAM with one point": _prompted(
        _of(
            "SamModel",
            _pixels(64),
            vision_config={**_SAM_ENCODER, **_SMALL, "output_channels": 64, "num_pos_feats": 32},
            prompt_encoder_config={"hidden_size": 64, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
            mask_decoder_config={"hidden_size": 64, "mlp_dim": 64, "num_attention_heads": 4, "iou_head_hidden_dim": 32},
        ),
        input_points=torch.tensor([[[[20.0, 30.0]]]] * 2),
    ),
}
