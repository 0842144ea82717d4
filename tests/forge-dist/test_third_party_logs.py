"""What other libraries say while a model is loaded and exported."""

import subprocess
import sys

import pytest

from .divided import zero

pytestmark = [pytest.mark.slow, pytest.mark.lane]


@zero
def test_standard_output_stays_the_callers(base, tmp_path):
    """Where DeepSpeed is installed, transformers' saving imports it; nothing is written to standard output."""
    script = (
        "import sys, torch, forge_dist\n"
        f"model = forge_dist.load_model({str(base)!r}, dtype=torch.float32, device='cpu')\n"
        f"forge_dist.export_model(model, {str(tmp_path / 'export')!r})\n"
        f"model.save_pretrained({str(tmp_path / 'saved')!r})\n"
        "print('deepspeed' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout == "True\n"
