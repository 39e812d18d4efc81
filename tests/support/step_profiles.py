"""Made-up step-time tables."""

import json


def write_step_profiles(folder, degrees):
    """One per degree, as ``stepserve profile`` names them; the path of the first."""
    sizes = (16, 128, 256, 512, 1024, 2048)
    for degree in degrees:
        seconds = [size * 1e-6 / degree + 1e-4 for size in sizes]
        name = "steps.json" if degree == 1 else f"steps_tp{degree}.json"
        (folder / name).write_text(
            json.dumps({"source": "made up", "sizes": sizes, "seconds": seconds})
        )
    return folder / "steps.json"
