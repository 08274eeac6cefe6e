// The page of `instr weights --view`: the part alone.

import { mount } from "./weights.js";

mount(document.getElementById("weights"), "");
