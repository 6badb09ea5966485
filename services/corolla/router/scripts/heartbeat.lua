-- Renews a lease with a new state and load. ARGV: server id, address or '', lease, lease in ms, who asks or ''.
-- Returns 1; 0 when the server is not known; 2 when another one has its address; 3 when somebody else registered it; the span that it is to
-- move to.
local READY, DRAINING = '2', '3'
listening_since(tonumber(ARGV[4]))
local holder = redis.call('HGET', ADDRESSES, ARGV[2])
if holder and holder ~= ARGV[1] then return 2 end
if is_anothers(ARGV[1], ARGV[5]) then return 3 end
local before = redis.call('HGET', LEASES, ARGV[1])
if not before or redis.call('HEXISTS', SERVERS, ARGV[1]) == 0 then return 0 end
hear(ARGV[1], ARGV[3])
local was_suspected = redis.call('DEL', suspect_key(ARGV[1])) == 1
local state = string.sub(ARGV[3], 1, 1)
if was_suspected or string.sub(before, 1, 1) ~= state then changed(ARGV[1]) end
local order = redis.call('HMGET', ORDER, 'server', 'address', 'span', 'version')
if order[1] == ARGV[1] and state ~= DRAINING then
  -- As long as it has not begun to move, it need not: what was decided on another placement may leave blocks alone.
  if order[4] == version() then return order[3] end
  redis.call('DEL', ORDER)
elseif order[1] and order[1] ~= ARGV[1] and order[2] == ARGV[2] and state == READY then
  redis.call('DEL', ORDER)  -- its next incarnation is there
end
return 1
