"""PEFT reads what we write and we read what PEFT writes: tensors, single layers, logits of a whole decoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide import models
from lowtide.adapters import lora
from lowtide.core import ModelFileError, linear

# PEFT's warnings stay errors: missing and unexpected keys are only warnings to it.
pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT 0.21 uses it
]

KEY = jax.random.key(0)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 7))
CONFIG = models.LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4
)


def external(model):
    """The base weights' names and layers: {hf module: (tree path's module, layer)}."""
    short = {"attn": "self_attn", "mlp": "mlp"}
    return {
        f"model.layers.{layer}.{short[part]}.{proj}": (model.layers[part][proj]["weight"], layer)
        for part in short
        for proj in model.layers[part]
        for layer in range(CONFIG.num_layers)
    }


@pytest.fixture
def base():
    # Larger weights than `init` gives, so that logits differ by far more than the tolerance.
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 2 else leaf, models.init(CONFIG, key=KEY))


@pytest.fixture
def hf(base, tmp_path):
    """The base model, written by us and loaded by transformers."""
    import transformers

    models.save(base, tmp_path / "base")
    return transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager").eval()


def tuned(base, *configs):
    """Adapters that do something: B is drawn, too."""
    model = base
    for config in configs:
        model = lora.add(model, config, key=KEY)

    def fill(path, leaf):
        fresh = path[-1] == jax.tree_util.GetAttrKey("lora_b")
        return 0.3 * jax.random.normal(jax.random.key(len(str(path))), leaf.shape) if fresh else leaf

    return jax.tree_util.tree_map_with_path(fill, model)


def torch_logits(model):
    import torch

    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def our_logits(model):
    return np.asarray(jax.jit(models.logits)(model, jnp.asarray(TOKENS)))


def adapters_of(peft_model):
    """{hf module: PEFT's layer} for every adapted module."""
    named = peft_model.get_base_model().named_modules()
    return {name: module for name, module in named if hasattr(module, "lora_A") and "default" in module.lora_A}


def assert_same_adapters(model, peft_model):
    layers = adapters_of(peft_model)
    nodes = {name: site for name, site in external(model).items() if isinstance(site[0], lora.LoRAWeight)}
    assert set(layers) == set(nodes)
    for name, (node, layer) in nodes.items():
        np.testing.assert_array_equal(
            layers[name].lora_A["default"].weight.detach().float().numpy(), node.lora_a[layer]
        )
        np.testing.assert_array_equal(
            layers[name].lora_B["default"].weight.detach().float().numpy(), node.lora_b[layer]
        )
        assert layers[name].scaling["default"] == pytest.approx(node.scaling)


CONFIGS = {
    "default": [lora.Config(rank=4, alpha=8)],
    "every projection": [lora.Config(rank=3, alpha=2.5, targets="layers/*/*_proj")],
    "ranks differ": [
        lora.Config(rank=4, alpha=8, targets="**/{q,v}_proj"),
        lora.Config(rank=2, alpha=3, targets="**/down_proj"),
    ],
}


@pytest.mark.parametrize("case", CONFIGS)
class TestPeftReadsOurs:
    def test_tensors_and_single_layers(self, base, hf, tmp_path, case):
        import torch
        from peft import PeftModel
        from peft.utils import load_peft_weights, set_peft_model_state_dict

        model = tuned(base, *CONFIGS[case])
        lora.save(model, tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
        peft_model = PeftModel.from_pretrained(hf, tmp_path / "adapter").eval()
        assert_same_adapters(model, peft_model)
        result = set_peft_model_state_dict(peft_model, load_peft_weights(tmp_path / "adapter"))
        assert not result.unexpected_keys
        assert not [key for key in result.missing_keys if "lora_" in key]
        for name, layer in adapters_of(peft_model).items():
            node, index = external(model)[name]
            x = np.random.default_rng(1).normal(size=(5, node.weight.shape[-1])).astype(np.float32)
            with torch.no_grad():
                want = layer(torch.tensor(x)).numpy()
            got = linear(jnp.asarray(x), jax.tree.map(lambda leaf, i=index: leaf[i], node))
            np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)

    def test_logits_with_and_after_merging(self, base, hf, tmp_path, case):
        import transformers
        from peft import PeftModel

        plain = torch_logits(hf)
        np.testing.assert_allclose(our_logits(base), plain, atol=1e-4)
        model = tuned(base, *CONFIGS[case])
        lora.save(model, tmp_path / "adapter")
        peft_model = PeftModel.from_pretrained(hf, tmp_path / "adapter").eval()
        want = torch_logits(peft_model)
        assert np.abs(want - plain).max() > 1e-2
        np.testing.assert_allclose(our_logits(model), want, atol=1e-4)
        merged = lora.merge(model)
        np.testing.assert_allclose(our_logits(merged), want, atol=1e-4)
        models.save(merged, tmp_path / "merged")
        reloaded = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / "merged", attn_implementation="eager"
        ).eval()
        np.testing.assert_allclose(torch_logits(reloaded), want, atol=1e-4)
        np.testing.assert_allclose(torch_logits(peft_model.merge_and_unload()), our_logits(merged), atol=1e-4)


PEFT_OPTIONS = {
    "default": {},
    "all-linear": {"target_modules": "all-linear"},
    "regular expression": {"target_modules": r".*\.(q_proj|up_proj)"},
    "rank-stabilised": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"self_attn\.q_proj": 6, "v_proj": 5}},
    "rank-stabilised patterns": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 6}},
    "excluded": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["q_proj"]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "rank above the smaller side": {"r": 40},
}


def peft_adapter(hf, **options):
    """A model of PEFT's with adapters that do something."""
    import torch
    from peft import LoraConfig, get_peft_model

    defaults = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    torch.manual_seed(0)
    peft_model = get_peft_model(hf, LoraConfig(**(defaults | options))).eval()
    for layer in adapters_of(peft_model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    return peft_model


class TestWeReadPefts:
    @pytest.mark.parametrize("options", PEFT_OPTIONS)
    def test_adapters_and_logits(self, base, hf, tmp_path, options):
        peft_model = peft_adapter(hf, **PEFT_OPTIONS[options])
        peft_model.save_pretrained(tmp_path / "adapter")
        model = lora.load(base, tmp_path / "adapter")
        assert_same_adapters(model, peft_model)
        np.testing.assert_allclose(our_logits(model), torch_logits(peft_model), atol=1e-4)

    def test_and_writes_back_what_it_read(self, base, hf, tmp_path):
        from peft import PeftModel

        options = PEFT_OPTIONS["rank-stabilised patterns"]
        peft_model = peft_adapter(hf, **options)
        peft_model.save_pretrained(tmp_path / "adapter")
        want = torch_logits(peft_model)
        model = lora.load(base, tmp_path / "adapter")
        lora.save(model, tmp_path / "again")
        again = PeftModel.from_pretrained(peft_model.unload(), tmp_path / "again").eval()
        assert_same_adapters(model, again)
        np.testing.assert_allclose(torch_logits(again), want, atol=1e-4)

    def test_bfloat16_adapters(self, base, hf, tmp_path):
        import torch

        peft_model = peft_adapter(hf).to(torch.bfloat16)
        peft_model.save_pretrained(tmp_path / "adapter")
        model = lora.load(base, tmp_path / "adapter")
        assert model.layers["attn"]["q_proj"]["weight"].lora_a.dtype == jnp.float32
        assert_same_adapters(model, peft_model)

    @pytest.mark.parametrize(
        ("named", "value"),
        [
            ("init_lora_weights", "pissa_niter_4"),
        ],
    )
    def test_what_it_cannot_read_is_refused_by_name(self, base, hf, tmp_path, named, value):
        peft_adapter(hf, **{named: value}).save_pretrained(tmp_path / "adapter")
        with pytest.raises(ModelFileError, match=rf"option '{named}' is not supported"):
            lora.load(base, tmp_path / "adapter")
